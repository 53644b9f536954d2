"""Fixtures of several folders: the real model's folder and a browser.

Kernels run on CPU tensors under Triton's interpreter, which must be enabled before triton is first imported. The
number of threads must be set before torch is imported.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
# Measured costs, and so draft lengths, depend on the machine. If no costs are measured, "auto" is Algorithm 1.
# Servers that tests start inherit BASS_MEASURE.
os.environ["BASS_MEASURE"] = "0"
# Several test workers share the cores. With more than one thread per worker, they were ten times slower.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return the folder of the real model in the user's cache. Download and convert the model if it is missing."""
    from bass_core.model.loading.weights import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture(scope="session")
def browser_executable() -> str:
    """Return the browser that BASS_BROWSER names, or an installed Chromium or Chrome.

    Without a browser the test is skipped, or fails if BASS_REQUIRE_BROWSER is set.
    """
    names = (os.environ.get("BASS_BROWSER"), "chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if name and (path := shutil.which(name))), None)
    if browser is None:
        missing = "No Chromium or Chrome is installed: install one, or name it in BASS_BROWSER."
        if os.environ.get("BASS_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    return browser
