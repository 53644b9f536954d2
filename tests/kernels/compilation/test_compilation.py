"""Every kernel compiles for Turing to Blackwell, without register spills, and fits into shared memory.

The tests need no GPU. For each capability, the installed Triton compiles a different sample of the launches of
people.py, and all attention that is close to spilling on Blackwell. If BASS_PINNED_TRITON names the folder of
another Triton (as in .ci/run), that compiles them too. Unless the kernels or Triton have changed
(tests/support/tested.py), only one launch of each kernel is compiled, with the installed Triton. If the compiler
dies, it ends the process of compile_variants.py, and the test fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.shapes import CAPABILITIES
from tests.kernels.compilation.compile_variants import in_order, kernels
from tests.support import ROOT, tested

COMMAND = "tests.kernels.compilation.compile_variants"
PINNED = os.environ.get("BASS_PINNED_TRITON", "")
needs_pinned = pytest.mark.skipif(not PINNED, reason="BASS_PINNED_TRITON is not set")
demand = pytest.mark.demand("triton")
unless_due = pytest.mark.skipif("triton" in tested.due(), reason="[installed] compiles these launches and more")
# The launches that need the most registers: every kind of attention in blocks of 64 rows, for heads of 64 and 128.
WIDEST = "^attend bfloat16.* BLOCK_M=64 .* GROUP=[38] "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "one_in"),
    [
        pytest.param("", 10**6, id="each kernel", marks=unless_due),
        pytest.param("", 299, id="installed", marks=demand),
        pytest.param(PINNED, 399, id="pinned", marks=(demand, needs_pinned)),
    ],
)
def test_every_kernel_compiles_without_spills(folder: str, one_in: int, tmp_path: Path) -> None:
    compiled = compile_variants(folder, tmp_path, "--one-in", str(one_in))
    assert {row["capability"] for row in compiled} == set(CAPABILITIES)
    assert {row["kernel"] for row in compiled} == set(kernels())


@pytest.mark.slow
@demand
@pytest.mark.parametrize(
    "folder", [pytest.param("", id="installed"), pytest.param(PINNED, id="pinned", marks=needs_pinned)]
)
def test_the_widest_attention_does_not_spill_on_blackwell(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASS_VARIANTS", WIDEST)
    compiled = compile_variants(folder, tmp_path, "--capability", "100")
    kinds = {tuple(re.findall(r"(?:BLOCK_D|GAP|SHARED|TREE|WHOLE)=(\w+)", row["variant"])) for row in compiled}
    # Two head sizes; chains, trees and gaps; shared or not; whole or in parts.
    assert len(kinds) == 2 * 3 * 2 * 2


def compile_variants(folder: str, cache: Path, *options: str) -> list[dict[str, Any]]:
    """Compile launches with the Triton in `folder`, or the installed one; return their lines."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": folder}
    command = [sys.executable, "-m", COMMAND, "--here", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def test_a_missing_barrier_is_noticed() -> None:
    columns = ["st.global.v4.b32 [%rd1], %r1;", "bar.sync 0;", "cp.async.cg.shared.global [%r2], [%rd2], 16;"]
    sums = [
        "@%p1 st.global.b32 [%rd3], %r3;",
        "bar.sync 0;",
        "@%p2 atom.global.gpu.acq_rel.add.u32 %r4, [%rd4], 1;",
    ]
    merged = ["bar.sync 0;", "@%p2 st.global.b32 [%rd4], 0;", "@%p3 ld.global.b32 %r5, [%rd3];"]
    lines = [*columns, *sums, *merged]
    assert in_order("\n".join(lines))
    for without in (1, 4, 6):
        assert not in_order("\n".join(lines[:without] + lines[without + 1 :]))
    assert not in_order("\n".join(lines).replace("acq_rel", "relaxed"))
