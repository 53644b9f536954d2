"""The inner loops of all products, as LLVM compiles them for the CPUs that people have.

LLVM compiles for any CPU, so these tests need none of them. They notice detours (for example, bytes that are
widened before they are multiplied), sums that are spilled to the stack, and prefetches in one burst.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

import kernels.cpu
from kernels.cpu import vectors
from kernels.cpu.calls import jit
from tests.support.models import slow_but

from .test_other_cpus import AVX2, AVX512

# Instructions that multiply, and how many products each adds up in a lane.
FMA, DOT, VNNI, PAIRS, SDOT = "v?fm(add|la)", "vdpbf16ps", "vpdpbusd", "vpmaddubsw", "sdot"
PRODUCTS = {FMA: 1, DOT: 2, VNNI: 4, PAIRS: 4, SDOT: 4}
# By LLVM's name of a CPU: its features, and how it multiplies bytes. LLVM lists no features of an Apple CPU.
CPUS = {
    "haswell": (AVX2, PAIRS),
    "znver2": (AVX2, PAIRS),
    "znver4": (f"{AVX512},+avx512vnni,+avx512bf16", VNNI),
    "alderlake": (f"{AVX2},+avxvnni", VNNI),
    "skylake-avx512": (AVX512, PAIRS),
    "icelake-server": (f"{AVX512},+avx512vnni", VNNI),
    "sapphirerapids": (f"{AVX512},+avx512vnni,+avx512bf16", VNNI),
    "apple-m1": ("", SDOT),
    "neoverse-v1": ("", SDOT),
}
# At most this many instructions of the loop for each instruction that multiplies: with one vector, with COLUMNS.
LIMITS = {FMA: (3.9, 2.1), DOT: (4.3, 2.3), VNNI: (6.1, 3.4), PAIRS: (11.7, 6.4), SDOT: (5.7, 3.5)}
# At most this many of them may use the stack: a block's sums and all sums so far are more than AVX2's registers.
SPILLS = {FMA: 0, DOT: 0, VNNI: 0.25, PAIRS: 0.7, SDOT: 0}
# Instructions that widen, narrow or blend numbers.
DETOUR = re.compile(r"vpmov[sz]x|vpack|vpunpck|vpmulld|vpblendw|[su]shll|[su]xtl|xtn|uzp|zip|[su]mull")
LOOP = re.compile(r"(?:j\w+|b\.\w+|cbn?z)\s.*?(\.L\w+)")


def loop_of(source: Any, cpu: str, form: str, dot: bool, width: int) -> list[str]:
    """Return the instructions of the loop over the blocks of `width` vectors, compiled for a CPU."""
    written = ir.Module()
    written.triple = f"{'aarch64' if CPUS[cpu][1] == SDOT else 'x86_64'}-unknown-linux-gnu"
    function = ir.Function(written, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 8), "product")
    b = ir.IRBuilder(function.append_basic_block())
    one_pass = source._Pass(b, form, dot, width, *function.args)
    (one_pass.bytes if one_pass.vectors == source.AS_BYTES else one_pass.floats)()
    b.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(str(written))
    machine = llvm.Target.from_triple(written.triple).create_target_machine(cpu=cpu, opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    text = machine.emit_assembly(module).replace("{vex}", "")
    lines = [re.split("#|//", line)[0].strip() for line in text.splitlines()]
    (end, jump), *others = [(i, found) for i, line in enumerate(lines) if (found := LOOP.fullmatch(line))
                            and f"{found[1]}:" in lines[:i]]  # fmt: skip
    assert not others
    body = lines[lines.index(f"{jump[1]}:") : end + 1]
    return [line for line in body if line and not line.startswith((".", "#")) and not line.endswith(":")]


@pytest.mark.parametrize("cpu", slow_but(["haswell", "apple-m1"], CPUS))
def test_the_loops_of_all_products_are_short(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset(name[1:] for name in CPUS[cpu][0].split(","))
    for name, value in (("cpu_features", features), ("cpu_name", cpu), ("has_tiles", False)):
        monkeypatch.setattr(jit, name, lambda value=value: value)
    for name in ("kinds", "vectors"):  # import them again, as they are on that CPU, until the test ends
        monkeypatch.setattr(kernels.cpu, name, getattr(kernels.cpu, name))
        monkeypatch.delitem(sys.modules, f"kernels.cpu.{name}")
    source = importlib.import_module(vectors.__name__)
    kinds = [("bfloat16", False), ("float16", False), ("int8", False), ("q8_0", False), ("q4_1", False)]
    for form, dot in kinds + [("bfloat16", True)] * ("avx512bf16" in features):
        kind = CPUS[cpu][1] if source.vectors_of(form, dot) == source.AS_BYTES else DOT if dot else FMA
        for width, limit in zip((1, source.COLUMNS), LIMITS[kind], strict=True):
            loop, case = loop_of(source, cpu, form, dot, width), f"{form}, {width} vectors"
            multiplications = source.PANEL * source.STEP * width // (source.LANES * PRODUCTS[kind])
            scaling = 2 * (source.PANEL // source.LANES) * width if PRODUCTS[kind] == 4 else 0
            found = sum(re.match(kind, line) is not None for line in loop)
            assert multiplications <= found <= multiplications + scaling, case
            assert len(loop) <= limit * multiplications, (case, len(loop) / multiplications)
            stack = [line for line in loop if re.search(r"rsp|rbp|\[sp", line)]
            assert len(stack) <= SPILLS[kind] * multiplications, (case, stack)
            assert not [line for line in loop if DETOUR.match(line)], case
            fetches = [i for i, line in enumerate(loop) if line.startswith(("prefetch", "prfm"))]
            assert fetches[-1] - fetches[0] > len(loop) // 3, case
