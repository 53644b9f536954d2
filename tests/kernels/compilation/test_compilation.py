"""Every kernel compiles for Turing to Blackwell, without register spills, and fits into shared memory.

The test needs no GPU. For each capability, the installed Triton compiles a different sample of the launches of
people.py. If BASS_PINNED_TRITON names the folder of another Triton (as in .ci/run), that compiles a sample too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.shapes import CAPABILITIES
from tests.support import ROOT

COMMAND = "tests.kernels.compilation.compile_variants"
PINNED = os.environ.get("BASS_PINNED_TRITON", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "one_in"),
    [
        pytest.param("", 67, id="installed"),
        pytest.param(
            PINNED, 97, id="pinned", marks=pytest.mark.skipif(not PINNED, reason="BASS_PINNED_TRITON is not set")
        ),
    ],
)
def test_every_kernel_compiles_without_spills(folder: str, one_in: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": folder}
    command = [sys.executable, "-m", COMMAND, "--one-in", str(one_in)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = {(row["capability"], row["kernel"]) for row in map(json.loads, done.stdout.splitlines())}
    assert {capability for capability, _ in compiled} == set(CAPABILITIES)
    assert {name for _, name in compiled} >= {"attend", "attend_prefix", "merge", "rotate", "skinny"}
