"""Every kernel compiles for Turing to Blackwell, without register spills, and fits into shared memory.

Contract: needs no GPU. Each capability compiles a quarter of the variants, another one than the next capability;
compile_variants compiles all. Compilation runs in a process without TRITON_INTERPRET, under which it would fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = "tests.kernels.compilation.compile_variants"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 89, 90, 120])
def test_compiles_without_spills(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", COMMAND, "--capability", str(capability), "--one-in", "4"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    products = {"gemv", "skinny", "add_parts"} if capability >= 80 else set()
    kernels = {"attend", "attend_prefix", "merge", "rotate", "put", "decide", "weigh", "gumbel", "least_kept"}
    kernels |= {"walk"} | products
    assert {row["kernel"] for row in rows} == kernels
