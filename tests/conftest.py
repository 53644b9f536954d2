"""Contract: what tests of several folders share: the real model's folder, a browser, and Triton's interpreter.

Kernels run on CPU tensors here, under the interpreter, which must be chosen before triton is first imported; so
must the number of threads before torch is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
# Measured costs depend on the machine, and with them draft lengths: "auto" is Algorithm 1 here, for servers too.
os.environ["BASS_MEASURE"] = "0"
# Several workers test side by side: threads that wait for each other on busy cores cost a factor of ten.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model as safetensors, from the user's cache; fetched and converted where it is not there."""
    from bass_core.loading.weights import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture(scope="session")
def browser_executable() -> str:
    """An installed Chromium or Chrome, or the one that BASS_BROWSER names; without any a test is skipped."""
    names = (os.environ.get("BASS_BROWSER"), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        missing = "No Chromium or Chrome is installed: install one, or name it in BASS_BROWSER."
        if os.environ.get("BASS_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found
