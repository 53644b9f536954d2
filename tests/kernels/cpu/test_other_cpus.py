"""The CPU tests on other kinds of CPU: AVX2 only, registers as short as NEON's, with or without VNNI.

Each runs in a process with its own cache, since numba compiles for one kind of CPU per process.
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

AVX2 = "+avx,+avx2,+fma,+f16c,+sse4.2,+ssse3,+popcnt,+bmi,+bmi2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
# By LLVM's name of a CPU: (features, numbers per vector register, whether the whole forward is tested).
CPUS = {
    "haswell": (AVX2, 8, True),
    "x86-64": ("+avx,+fma,+f16c,+sse4.2,+ssse3,+popcnt", 4, True),
    "alderlake": (f"{AVX2},+avxvnni", 8, False),
    "skylake-avx512": (AVX512, 16, False),
    "knl": (f"{AVX2},+avx512f,+avx512cd", 8, False),
    "znver4": (f"{AVX512},+avx512vnni,+avx512bf16", 16, False),
}
TESTS = ["test_products.py", "attention/test_attention.py", "attention/test_tree.py", "test_forward.py",
         "test_same_bits.py"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.demand("cpu")
@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or "avx2" not in cpu_features(),
    reason="an x86 CPU with AVX2 is needed",
)
@pytest.mark.parametrize("name", CPUS)
def test_the_cpu_tests_pass_on_another_cpu(name: str, tmp_path: Path) -> None:
    features, lanes, forward = CPUS[name]
    missing = [feature for feature in features.split(",") if feature[1:] not in cpu_features()]
    if missing:
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    settings = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "XDG_CACHE_HOME": str(tmp_path)}
    expected = lanes, "bf16" in features, "vnni" in features
    check = f"from kernels.cpu import kinds; assert (kinds.LANES, kinds.FAST_DOT, kinds.HAS_VNNI) == {expected}"
    run = f"import sys, pytest; {check}; sys.exit(pytest.main(sys.argv[1:]))"
    files = [str(Path(__file__).parent / test) for test in (TESTS if forward else TESTS[:1])]
    done = subprocess.run(
        [sys.executable, "-c", run, "-n0", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
