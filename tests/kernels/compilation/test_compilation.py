"""Every kernel compiles for Turing to Blackwell, without register spills, and fits into shared memory.

Contract: needs no GPU. Each capability compiles a fifth of the variants, another one than the next capability, so
that each variant is compiled once; compile_variants alone compiles all for all. Compilation runs in a process
without TRITON_INTERPRET, under which it would fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .variants import SHARED

ROOT = Path(__file__).parents[3]
COMMAND = "tests.kernels.compilation.compile_variants"


@pytest.mark.slow
def test_compiles_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", COMMAND, "--one-in", "5"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[int, set[str]] = {}
    for row in map(json.loads, done.stdout.splitlines()):
        found.setdefault(row["capability"], set()).add(row["kernel"])
    kernels = {
        "attend",
        "attend_prefix",
        "merge",
        "rotate",
        "put",
        "decide",
        "weigh",
        "gumbel",
        "least_kept",
        "walk",
    }
    products = {"gemv", "skinny", "add_parts"}
    assert found == {capability: kernels | (products if capability >= 80 else set()) for capability in SHARED}
