"""Every shipped variant of every kernel compiles for Ampere, Hopper and Blackwell, keeps its registers, and fits.

Contract: no GPU is needed; compilation runs in a process without TRITON_INTERPRET, under which it would fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_variants", str(arch)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"attend", "merge", "gemv", "skinny", "rotate", "put", "decide", "gumbel"}
    assert {row["kernel"] for row in rows} == kernels
    assert not [row for row in rows if row["spills"] or row["local"] or row["shared"] > row["shared_limit"]]
