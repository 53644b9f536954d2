"""The same tests on what is left of this CPU when it has only AVX2, with registers as short as NEON's, and the
products of other CPUs: with VNNI in short registers, without it in long ones, with fast bfloat16 products.

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
from tests.support import ROOT

_AVX2 = "+avx,+avx2,+fma,+f16c,+sse4.2,+ssse3,+popcnt,+bmi,+bmi2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
# By LLVM's name: what it has, the lanes that follow, and whether the whole forward is tested.
CPUS = {
    "haswell": (_AVX2, 8, True),
    "x86-64": ("+avx,+fma,+f16c,+sse4.2,+ssse3,+popcnt", 4, True),
    "alderlake": (f"{_AVX2},+avxvnni", 8, False),
    "skylake-avx512": (_AVX512, 16, False),
    "znver4": (f"{_AVX512},+avx512vnni,+avx512bf16", 16, False),
}
TESTS = ["test_products.py", "attention/test_attention.py", "attention/test_tree.py", "test_forward.py",
         "test_same_bits.py"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or "avx2" not in cpu_features(),
    reason="an x86 CPU with AVX2 is needed",
)
@pytest.mark.parametrize("name", CPUS)
def test_another_cpu(name: str, tmp_path: Path) -> None:
    features, lanes, forward = CPUS[name]
    lacking = [one for one in features.split(",") if one[1:] not in cpu_features()]
    if lacking:
        pytest.skip(f"this CPU has no {', '.join(lacking)}")
    own = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "XDG_CACHE_HOME": str(tmp_path)}
    known = lanes, "bf16" in features, "vnni" in features
    check = f"from kernels.cpu import kinds; assert (kinds.LANES, kinds.FAST_DOT, kinds.HAS_VNNI) == {known}"
    run = f"import sys, pytest; {check}; sys.exit(pytest.main(sys.argv[1:]))"
    files = [str(Path(__file__).parent / test) for test in (TESTS if forward else TESTS[:1])]
    done = subprocess.run(
        [sys.executable, "-c", run, "-n0", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
