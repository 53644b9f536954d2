"""`python -m tests.kernels.compilation.compile_int8 80 90 120`: compile the int8 kernels without a GPU.

Contract: compiles each variant of kernels/triton/linear_int8.py and prints one JSON line for each variant and
architecture: {"kernel", "variant", "arch", "spills", "local", "shared"}, read from the cubin. Must run without
TRITON_INTERPRET. Exit status 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import linear_int8
from tests.kernels.compilation.compile_variants import resources

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OPTIONS = ("num_warps", "num_stages")


def variants() -> Iterator[tuple[str, Any, ASTSource, dict[str, int]]]:
    """(label, kernel, source, launch options): with norm and residual; in bfloat16, also bare."""
    for dtype, rows, gate, bare in product(NAMES, (1, 16, 64), (False, True), (False, True)):
        if rows > linear_int8.MOST_ROWS[dtype.itemsize] or (bare and dtype != torch.bfloat16):
            continue
        tile = linear_int8.tiles(rows, gate, dtype.itemsize)
        constants = {name: size for name, size in tile.items() if name not in OPTIONS}
        constants |= {"NORM": not bare, "GATE": gate, "RESIDUAL": not bare, "EVEN": not bare}
        if rows > 1:
            constants |= {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "WIDEN": False}
        kernel: Any = linear_int8.gemv_int8 if rows == 1 else linear_int8.skinny_int8
        label = f"{NAMES[dtype]} M={rows} gate={gate} bare={bare}"
        yield label, kernel, source(kernel, NAMES[dtype], constants), {n: tile[n] for n in OPTIONS if n in tile}


def source(kernel: Any, name: str, constants: dict[str, Any]) -> ASTSource:
    """The kernel as Triton specialises it for such a launch: pointers and sizes divisible by 16."""
    types = {"weight": "*i8", "scale": "*fp32", "eps": "fp32", "m_size": "i32", "n_size": "i32", "k_size": "i32"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, f"*{name}")
        for argument in kernel.arg_names
    }
    odd = (*constants, "eps", "m_size")
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in odd}
    return ASTSource(kernel, signature, constexprs=constants, attrs=attrs)


def main(architectures: list[int]) -> None:
    """Compile every variant and print its line."""
    for arch, (label, kernel, code, options) in product(architectures, list(variants())):
        compiled = triton.compile(code, target=GPUTarget("cuda", arch, 32), options=options)
        row = {"kernel": kernel.__name__, "variant": label, "arch": arch, "shared": compiled.metadata.shared}
        products = sum(word in compiled.asm["ptx"] for word in ("mma.sync", "wgmma.mma"))
        print(json.dumps(row | resources(compiled.asm["cubin"]) | {"mma": products > 0}), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
