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


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | NARROW


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> tuple[Path, Path]:
    """Return the folders of a pair whose kernels are compiled.

    Under the emulation, numba would compile calls of that system's functions.
    """
    target, draft = save_tiny_pair(tmp_path_factory.mktemp("folder") / "pär")
    options = f"--pair {target} --draft {draft} --device cpu --dtype bfloat16 --max-new-tokens 16 --temperature 1"
    here = [sys.executable, "-m", "bass_core", "generate", "Hi", *options.split()]
    subprocess.run(here, cwd=ROOT, env=environment, capture_output=True, check=True)
    return target, draft


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_command_and_the_page_work(
    system: str, folders: tuple[Path, Path], environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tests.support.emulated_system", system, *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("acceptance rate") == 2
    assert "amusd" in done.stdout and done.stdout.splitlines()[-1].startswith("a recording")
