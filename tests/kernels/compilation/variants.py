"""Every kernel variant that is shipped or may be chosen, as Triton specialises it at a launch.

Contract: `variants(capability)` lists them for one compute capability: in each dtype with every flag set, and in
the dtype usual there also with none (no window, no norm, blocks that are not full). A gap and trees exclude each
other: attention has variants with either. Non-goals: K that is no
multiple of 16 at more than 16 rows, which compiles with spills but occurs in no model; products below compute
capability 8.0, which torch computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from kernels.triton import accept, block, cache_write, linear, nucleus, segments, walk
from kernels.triton import attention as fused_attention

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}
# Most shared memory of a program in bytes, by compute capability (CUDA C++ Programming Guide).
SHARED = {75: 64 * 1024, 80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
# Dimension 96 uses the same kernel as 80: both are padded to 128.
HEAD_DIMS = (64, 80, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_FUSION = {"enable_fp_fusion": False}
# What attention masks, by the name of a variant.
FLAGS = {
    "": {"WINDOW": False, "GAP": False, "TREE": False, "SOFTCAP": False},
    "masks": {"WINDOW": True, "GAP": True, "TREE": False, "SOFTCAP": True},
    "tree": {"WINDOW": True, "GAP": False, "TREE": True, "SOFTCAP": True},
    "bare tree": {"WINDOW": False, "GAP": False, "TREE": True, "SOFTCAP": False},
}


@dataclass
class Variant:
    """A kernel with its pointers' dtypes, constexprs, launch options and the names of its float arguments.

    odd: the name of a size that is no multiple of 16; "" for none.
    """

    function: Any
    label: str
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    options: dict[str, int]
    floats: tuple[str, ...] = ()
    odd: str = ""

    def source(self) -> ASTSource:
        """The kernel as Triton specialises it for such a launch: pointers and sizes divisible by 16."""
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
                # Strides and sizes are multiples of the head size, except those that count
                # batch rows or query tokens.
                if re.fullmatch(r"dim|vocab|[a-z]+_([a-z]|size|kv)", name) and name not in ("m_size", self.odd):
                    attrs[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.function, signature, constexprs=self.constants, attrs=attrs)


def split_options(tile: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """(constexprs, launch options) of a tile."""
    options = {name: tile[name] for name in ("num_warps", "num_stages") if name in tile}
    return {name: size for name, size in tile.items() if name not in options}, options


def attention(capability: int, usual: torch.dtype) -> Iterator[Variant]:
    """Each head dimension (80 and 96 are masked), dtype and tile: all masks and a prefix, a gap or trees; bare.

    The other 16-bit dtype takes the same registers as the usual one, so one dimension is enough.
    """
    for dim, dtype, kind in product(HEAD_DIMS, DTYPES, FLAGS):
        if dtype != usual and (kind in ("", "bare tree") or (dtype.itemsize == 2 and dim != 128)):
            continue
        flags = FLAGS[kind]
        if dim == 256 and capability < 80:
            # There it spills at any size: torch's attention is the one for such devices (model/attention.py).
            continue
        device = SHARED[capability], capability >= 80
        tiles = (fused_attention.tiles(dim, rows, dtype.itemsize, *device, flags["TREE"]) for rows in (1, 64))
        for shape in sorted({tuple(tile.items()) for tile in tiles}):
            constants, options = split_options(dict(shape))
            constants |= {
                "GROUP": 4, "EXACT": dim == constants["BLOCK_D"], "SEGMENT": fused_attention.SEGMENT,
                **flags, "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "WIDEN": False,
            }  # fmt: skip
            label = f"{NAMES[dtype]} D={dim} M={constants['BLOCK_M']} {kind}".strip()
            pointers, floats = _attention_pointers(dtype, torch.float32), ("scaling", "softcap")
            yield Variant(segments.attend_prefix, label, pointers, constants, options | NO_FUSION, floats)
            for whole in (False, True):
                more = constants | {"HEADS": 32, "SHARED": flags["SOFTCAP"], "WHOLE": whole}
                pointers = _attention_pointers(dtype, dtype if whole else torch.float32)
                name = f"{label}{' whole' if whole else ''}"
                yield Variant(segments.attend, name, pointers, more, options | NO_FUSION, floats)
    for dim, dtype, kind in product(HEAD_DIMS, DTYPES, FLAGS):
        if dtype != usual and (dim != 128 or kind in ("", "bare tree")):
            continue
        flags = {name: flag for name, flag in FLAGS[kind].items() if name != "SOFTCAP"}
        block_d = triton.next_power_of_2(dim)
        constants = {
            "GROUP": 4, "SHARED": FLAGS[kind]["SOFTCAP"], "EXACT": dim == block_d, "BLOCK_D": block_d,
            "SEGMENT": fused_attention.SEGMENT, "UNROLLED": fused_attention.UNROLLED,
            **flags,
        }  # fmt: skip
        label = f"{NAMES[dtype]} D={dim} {kind}".strip()
        pointers = _attention_pointers(dtype, torch.float32) | {"parts": torch.float32, "out": dtype}
        yield Variant(segments.merge, label, pointers, constants, {"num_warps": 4} | NO_FUSION)


def _attention_pointers(dtype: torch.dtype, out: torch.dtype) -> dict[str, torch.dtype]:
    integers = ("lengths", "starts", "groups", "order", "skips", "bases", "positions", "marks")
    return {
        **dict.fromkeys(("q", "k", "v", "prefix_k", "prefix_v"), dtype), **dict.fromkeys(integers, torch.int64),
        **dict.fromkeys(("out", "peaks", "totals"), out),
    }  # fmt: skip


def products(usual: torch.dtype) -> Iterator[Variant]:
    """Each tile that is shipped or may be chosen: with norm and residual, and bare."""
    for dtype, rows, gate, bare in product(DTYPES, (1, 16, 64), (False, True), (False, True)):
        if rows > linear.MOST_ROWS[dtype.itemsize] or (bare and dtype != usual):
            continue
        shapes = [linear.tiles(rows, gate, dtype.itemsize)]
        if rows == 64 and dtype == usual:
            # K in one part, and in eight.
            shapes += [linear.split_tiles(64, outputs, gate, 2, 264) for outputs in (50304, 640)]
        for tile in shapes:
            yield from one_product(dtype, rows, gate, bare, tile)


def one_product(dtype: torch.dtype, rows: int, gate: bool, bare: bool, tile: dict[str, int]) -> Iterator[Variant]:
    """The launches of a product, two if K is split; a bare one has a last block of K that is not full."""
    constants, options = split_options(tile)
    flags = {"NORM": not bare, "GATE": gate, "RESIDUAL": not bare}
    parts = tile.get("SPLIT_K", 1)
    constants |= flags | {"EVEN": not bare}
    label = f"{NAMES[dtype]} M={rows} N={tile['BLOCK_N']} parts={parts}"
    label += f"{' gate' if gate else ''}{' bare' if bare else ''}"
    if rows > 1:
        precision = "ieee" if dtype == torch.float32 else "tf32"
        constants |= {"SPLIT_K": parts, "PRECISION": precision, "WIDEN": False}
    odd = "k_size" if bare and rows <= 16 else ""
    pointers = dict.fromkeys(("x", "weight", "norm", "residual", "out"), dtype)
    if parts > 1:
        pointers["out"] = torch.float32
        sums = {"parts": torch.float32, "residual": dtype, "out": dtype}
        sizes = flags | {"SPLIT_K": parts, "BLOCK": linear.BLOCK_OF_SUMS}
        yield Variant(linear.add_parts, label, sums, sizes, {"num_warps": 4}, ("eps",), odd)
    function = linear.gemv if rows == 1 else linear.skinny
    yield Variant(function, label, pointers, constants, options, ("eps",), odd)


def writes(usual: torch.dtype) -> Iterator[Variant]:
    """Cache writes, with norms of queries and keys and a prefix, and without, for head dimensions 80 and 128."""
    for dtype, dim in product(DTYPES, (80, 128)):
        if dtype != usual and dim != 128:
            continue
        pointers = dict.fromkeys(("qkv", "cache", "q_norm", "k_norm", "keys", "values"), dtype)
        pointers |= dict.fromkeys(("lengths", "starts", "positions"), torch.int64)
        pointers |= dict.fromkeys(("cos", "sin"), torch.float32)
        block = triton.next_power_of_2(dim)
        for every in (False, True):
            heads = {"HEADS": 32, "KV_HEADS": 8, "HALF": dim // 2, "BLOCK": block // 2}
            heads |= {"NORM": every, "SHARED": every, "TREE": every}
            label = f"{NAMES[dtype]} D={dim}{' norm shared tree' if every else ''}"
            yield Variant(cache_write.rotate, label, pointers, heads, {"num_warps": 1}, ("eps",))
        for shared in (False, True):
            sizes = {"DIM": dim, "BLOCK_D": block, "SHARED": shared}
            label = f"{NAMES[dtype]} D={dim}{' shared' if shared else ''}"
            yield Variant(cache_write.put, label, pointers, sizes, {"num_warps": 1})


def decisions() -> Iterator[Variant]:
    """Each verification that is launched (soft: q is given; drawn: the next token is sampled), draws, and top-p.

    Vocabularies are seldom multiples of 16, so the variant with two lanes has one that is not.
    """
    floats = dict.fromkeys(("p", "q", "chances", "reach", "p_out", "q_out", "u_out", "weights"), torch.float32)
    integers = ("drafts", "num_drafted", "choices", "sequences", "positions", "begins", "seed", "streams", "ids")
    pointers = floats | dict.fromkeys((*integers, "accepted_out", "next_out", "out"), torch.int64)
    options = {"num_warps": accept.WARPS}
    # (verification, soft, drawn)
    launches = [
        (accept.Verification.REJECTION, True, True),
        (accept.Verification.REJECTION, False, True),
        (accept.Verification.BLOCK, True, True),
        (accept.Verification.BLOCK, False, True),
        (accept.Verification.CHOICES, False, False),
        (accept.Verification.COIN, False, True),
        (accept.Verification.COIN, False, False),
    ]
    for (verification, soft, drawn), lanes in [(launches[0], 2), *((launch, 128) for launch in launches)]:
        constants = {
            "VERIFICATION": int(verification), "SOFT": soft, "DRAWN": drawn, "ROWS": 1, "BLOCK_L": lanes,
            "BLOCK_V": accept.BLOCK_V,
        }  # fmt: skip
        label = f"{verification.name}{' soft' if soft else ''}{' drawn' if drawn else ''} lanes={lanes}"
        odd = "vocab" if lanes == 2 else ""
        yield Variant(accept.decide, label, pointers, constants, options, ("chance",), odd)
    told = pointers | dict.fromkeys(("chances_out", "reach_out"), torch.float32)
    for soft, odd in ((True, ""), (True, "vocab"), (False, "")):
        constants = {"SOFT": soft, "ROWS": 1, "BLOCK_V": block.BLOCK_V}
        label = f"{'soft' if soft else ''}{' odd' if odd else ''}"
        yield Variant(block.weigh, label, told, constants, {"num_warps": block.WARPS}, odd=odd)
    for named in (False, True):
        constants = {"NAMED": named, "BLOCK_V": accept.BLOCK_V}
        odd = "" if named else "vocab"
        yield Variant(accept.gumbel, "named" if named else "", pointers, constants, options, odd=odd)
    kept = {"probs": torch.float32, "out": torch.float32}
    constants, options = {"BLOCK_V": nucleus.BLOCK_V}, {"num_warps": nucleus.WARPS}
    for odd in ("", "vocab"):
        yield Variant(nucleus.least_kept, odd, kept, constants, options, ("top_p",), odd)


def walks() -> Iterator[Variant]:
    """The walk through trees, whose vocabulary may be no multiple of 16."""
    floats = dict.fromkeys(("p", "q", "chances", "p_out", "q_out", "u_out"), torch.float32)
    integers = ("tokens", "parents", "drawn", "sequences", "positions", "begins", "seed", "ends")
    pointers = floats | dict.fromkeys(integers, torch.int64)
    for odd in ("", "vocab"):
        yield Variant(walk.walk, odd, pointers, {"BLOCK_V": walk.BLOCK_V}, {"num_warps": walk.WARPS}, odd=odd)


def variants(capability: int) -> Iterator[Variant]:
    """All variants for one compute capability."""
    usual = torch.float16 if capability < 80 else torch.bfloat16
    yield from attention(capability, usual)
    if capability >= 80:
        yield from products(usual)
    yield from writes(usual)
    yield from decisions()
    yield from walks()
