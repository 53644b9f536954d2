"""`python -m tests.kernels.compile_variants 80 90 120`: compile each shipped variant of each kernel, with no GPU.

Contract: prints one JSON line a variant and architecture: {"kernel", "variant", "arch", "registers", "local",
"spills", "shared", "shared_limit"}, read from the cubin; `spills` counts accesses to local memory. Must run
without TRITON_INTERPRET. Exit status 0.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import accept, cache_write, fused_attention, linear

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}
# Shared memory a program may take, in bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
# 96 shares the kernel of 80.
HEAD_DIMS = (64, 80, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Variant:
    """A kernel with the dtypes of its pointers, its floats, its constexprs and its launch options."""

    function: Any
    label: str
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    options: dict[str, int]
    floats: tuple[str, ...] = ()

    def source(self) -> ASTSource:
        """The kernel as Triton would see it at such a launch: pointers and sizes divisible by 16."""
        signature: dict[str, str] = {}
        attrs: dict[tuple[int], list[list[Any]]] = {}
        for index, name in enumerate(self.function.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in self.pointers:
                signature[name] = "*" + NAMES[self.pointers[name]]
                attrs[(index,)] = [["tt.divisibility", 16]]
            elif name in self.floats:
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                # Strides: but for the batch's and the number of query tokens all are multiples of a head.
                if re.fullmatch(r"dim|vocab|[a-z]+_([a-z]|size|kv)", name) and name != "m_size":
                    attrs[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.function, signature, constexprs=self.constants, attrs=attrs)


def split_options(tile: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constexprs and launch options of a tile."""
    options = {name: tile[name] for name in ("num_warps", "num_stages") if name in tile}
    return {name: size for name, size in tile.items() if name not in options}, options


def attention(shared: int) -> Iterator[Variant]:
    """Each padded head dimension, exact or masked (80, 96), dtype and tile, with every mask on."""
    for dim, dtype in product(HEAD_DIMS, DTYPES):
        shapes = {tuple(fused_attention.tiles(dim, rows, dtype.itemsize, shared).items()) for rows in (1, 64)}
        for shape in sorted(shapes):
            constants, options = split_options(dict(shape))
            pointers = dict.fromkeys(("q", "k", "v"), dtype)
            pointers |= {"out": torch.float32, "lengths": torch.int64, "lse": torch.float32}
            constants |= {
                "HEADS": 32, "GROUP": 4, "EXACT": dim == constants["BLOCK_D"], "WINDOW": True, "SOFTCAP": True,
                "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "WIDEN": False,
            }  # fmt: skip
            label = f"{NAMES[dtype]} D={dim} M={constants['BLOCK_M']}"
            yield Variant(fused_attention.attend, label, pointers, constants, options, ("scaling", "softcap"))
    for dim in HEAD_DIMS:
        block_d = triton.next_power_of_2(dim)
        yield Variant(
            fused_attention.merge,
            f"D={dim} splits=32",
            {"parts": torch.float32, "lse": torch.float32, "out": torch.bfloat16},
            {"EXACT": dim == block_d, "BLOCK_D": block_d, "BLOCK_S": 32},
            {"num_warps": 4},
        )


def products() -> Iterator[Variant]:
    """Products with everything before and after them, at each tile that is shipped."""
    for dtype in DTYPES:
        for rows in (1, 16, 64)[: 3 if dtype.itemsize == 2 else 2]:
            for gate in (False, True):
                constants, options = split_options(linear.tiles(rows, gate, dtype.itemsize))
                constants |= {"NORM": True, "GATE": gate, "RESIDUAL": True, "EVEN": True}
                if rows > 1:
                    precision = "ieee" if dtype == torch.float32 else "tf32"
                    constants |= {"PRECISION": precision, "WIDEN": False}
                yield Variant(
                    linear.gemv if rows == 1 else linear.skinny,
                    f"{NAMES[dtype]} M={rows} gate={gate}",
                    dict.fromkeys(("x", "weight", "norm", "residual", "out"), dtype),
                    constants,
                    options,
                    ("eps",),
                )


def rounds() -> Iterator[Variant]:
    """Cache writes, and the decisions of a round."""
    for dtype in DTYPES:
        pointers = dict.fromkeys(("qkv", "cache", "q_norm", "k_norm", "keys", "values"), dtype)
        pointers |= {"lengths": torch.int64, "cos": torch.float32, "sin": torch.float32}
        yield Variant(
            cache_write.rotate,
            NAMES[dtype],
            pointers,
            {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64, "NORM": True},
            {"num_warps": 1},
            ("eps",),
        )
        yield Variant(cache_write.put, NAMES[dtype], pointers, {"DIM": 128, "BLOCK_D": 128}, {"num_warps": 1})
    floats = dict.fromkeys(("p", "q", "p_out", "q_out", "u_out", "weights"), torch.float32)
    integers = ("drafts", "counts", "choices", "sequences", "positions", "seed", "accepted_out", "next_out")
    pointers = floats | dict.fromkeys((*integers, "roles", "ids", "out"), torch.int64)
    options = {"num_warps": accept.WARPS}
    for rule in accept.Rule:
        for length in (128,):
            flags = {
                "SOFT": rule == 0,
                "DRAWN": rule != 1,
                "ROWS": 1,
                "BLOCK_L": length,
                "BLOCK_V": accept.BLOCK_V,
            }
            yield Variant(
                accept.decide, f"{rule.name} lanes={length}", pointers, {"RULE": int(rule), **flags}, options,
                ("chance",),
            )  # fmt: skip
    yield Variant(accept.gumbel, "", pointers, {"NAMED": True, "BLOCK_V": accept.BLOCK_V}, options)


def variants(arch: int) -> Iterator[Variant]:
    """All that are shipped for an architecture."""
    yield from attention(SHARED[arch])
    yield from products()
    yield from rounds()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, bytes of local memory a thread, and how many instructions touch local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|LOCAL):(\d+)", text))
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\S+)", text, re.MULTILINE)
    assert len(instructions) > 10, "no disassembly"
    spills = sum(name.startswith(("STL", "LDL")) for name in instructions)
    return {"registers": int(found["REG"]), "local": int(found["LOCAL"]), "spills": spills}


def compile_one(arch: int, index: int) -> dict[str, Any]:
    """What the cubin of variant `index` takes."""
    variant = next(islice(variants(arch), index, None))
    compiled = triton.compile(variant.source(), target=GPUTarget("cuda", arch, 32), options=dict(variant.options))
    row = {"kernel": variant.function.__name__, "variant": variant.label, "arch": arch}
    row |= resources(compiled.asm["cubin"])
    return row | {"shared": compiled.metadata.shared, "shared_limit": SHARED[arch]}


def main(architectures: list[int]) -> None:
    """Compile on all cores, print."""
    jobs = [(arch, index) for arch in architectures for index, _ in enumerate(variants(arch))]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for row in pool.map(compile_one, *zip(*jobs, strict=True), chunksize=4):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
