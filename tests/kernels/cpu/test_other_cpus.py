"""The same tests on what is left of this CPU when it has only AVX2, and with registers as short as NEON's.

A process of its own, since numba compiles for one kind of CPU a process; with a cache of its own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.calls.jit import cpu_features

ROOT = Path(__file__).parents[3]
CPUS = {
    8: ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+ssse3,+popcnt,+bmi,+bmi2"),
    4: ("x86-64", "+avx,+fma,+f16c,+sse4.2,+ssse3,+popcnt"),
}
TESTS = ["test_products.py", "attention/test_attention.py", "attention/test_trees.py", "test_forward.py",
         "test_same_bits.py"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or "avx2" not in cpu_features(),
    reason="an x86 CPU with AVX2 is needed",
)
@pytest.mark.parametrize("lanes", CPUS)
def test_a_cpu_with_shorter_registers(lanes: int, tmp_path: Path) -> None:
    name, features = CPUS[lanes]
    own = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "XDG_CACHE_HOME": str(tmp_path)}
    check = f"from kernels.cpu import kinds; assert (kinds.LANES, kinds.HAS_DOT) == ({lanes}, False)"
    run = f"import sys, pytest; {check}; sys.exit(pytest.main(sys.argv[1:]))"
    files = [str(Path(__file__).parent / test) for test in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", run, "-n0", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
