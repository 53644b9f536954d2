"""The library, the command and the page work without the features that only Linux has.

tests/support/emulated_system.py emulates Windows and macOS by removing those features; it runs none of their code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.page import save_tiny_pair

# The encoding of a Western European Windows console.
NARROW = {"PYTHONIOENCODING": "cp1252"}


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_command_and_the_page_work(system: str, tmp_path: Path) -> None:
    target, draft = save_tiny_pair(tmp_path / "pär")
    command = [sys.executable, "-m", "tests.support.emulated_system", system, str(target), str(draft)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | NARROW
    # Compile the kernels here: under the emulation, numba would compile calls of that system's functions.
    options = f"--pair {target} --draft {draft} --device cpu --dtype bfloat16 --max-new-tokens 16 --temperature 1"
    here = [sys.executable, "-m", "bass_core", "generate", "Hi", *options.split()]
    subprocess.run(here, cwd=ROOT, env=environment, capture_output=True, check=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("acceptance rate") == 2
    assert "amusd" in done.stdout and done.stdout.splitlines()[-1].startswith("a recording")
