"""A layer's matrix products alone: our kernels at several tile sizes beside torch, in shares of copy bandwidth.

Contract: the 7.8B target's and the 310M draft's weights, each with its fused norm, gate or residual sum, at 1, 8
and 40 rows; captured launches over enough copies of a weight to overflow the cache. The tile that is best over a
whole layer of the target gets its own line: roofline.py times steps with it, and later sections use it where the
step was faster. These figures decide what `tiles` and `Plan` should contain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.backends import why_backend_unavailable
from kernels.reference import linear as linear_reference

from ..context import Context, answers
from ..timing import captured_ms

Tile = dict[str, int]
# (name, outputs, inputs, fused operation)
SHAPES = (
    ("qkv", 6144, 4096, "norm"),
    ("output", 4096, 4096, "residual"),
    ("gate, up", 15360, 4096, "gate"),
    ("down", 4096, 15360, "residual"),
    ("head", 50304, 4096, "norm"),
    ("draft qkv", 3072, 2048, "norm"),
    ("draft gate, up", 6656, 2048, "gate"),
    ("draft down", 2048, 6656, "residual"),
)
_ONE = [(8, 512, 1, 4), (8, 512, 3, 4), (4, 1024, 1, 4), (16, 256, 1, 4), (8, 1024, 1, 8), (2, 2048, 1, 8)]
_FEW = [(16, 128, 4, 4), (16, 256, 4, 4), (32, 128, 4, 4), (32, 64, 6, 4), (64, 128, 3, 4), (32, 256, 3, 8)]


def run(ctx: Context) -> None:
    """Every shape at 1, 8 and 40 rows."""
    reason = why_backend_unavailable("fused", ctx.device)
    if reason:
        ctx.row("products", "not run", reason)
        return
    for rows in (1, 40) if ctx.dry else (1, 8, 40):
        totals: dict[bool, list[dict[str, tuple[Tile, float]]]] = {False: [], True: []}
        for shape in (SHAPES[0], SHAPES[2]) if ctx.dry else SHAPES:
            if ctx.late:
                return
            times = measure(ctx, min(rows, 16) if ctx.dry else rows, *shape)
            if not shape[0].startswith("draft"):
                totals[shape[3] == "gate"].append(times)
        for gate, measured in totals.items():
            name_best(ctx, rows, gate, measured)


def name_best(ctx: Context, rows: int, gate: bool, measured: list[dict[str, tuple[Tile, float]]]) -> None:
    """Record the tile with the least total time, among those that ran for every product."""
    common = [label for label in measured[0] if all(label in times for times in measured)]
    if not common:
        return
    total = {label: sum(times[label][1] for times in measured) for label in common}
    best = min(common, key=lambda label: total[label])
    ctx.row(f"target x {rows}", f"best tile, gate={gate}", 1000 * total[best], "us", best)
    ctx.emit(kind="tile", rows=rows, gate=gate, tile=measured[0][best][0])


@torch.inference_mode()
def measure(
    ctx: Context, rows: int, name: str, outputs: int, inputs: int, extra: str
) -> dict[str, tuple[Tile, float]]:
    """Time one product with torch, then with each tile, and report the best. Returns each tile's milliseconds."""
    from kernels.triton.linear import linear, tiles

    outputs, inputs = (48, 64) if ctx.dry else (outputs, inputs)
    gate = extra == "gate"
    bytes_ = outputs * (2 if gate else 1) * inputs * ctx.dtype.itemsize
    copies = 1 if ctx.dry else max(2, min(64, (1 << 29) // bytes_))
    shape = (outputs * (2 if gate else 1), inputs)
    weights = [torch.randn(shape, dtype=ctx.dtype, device=ctx.device) * inputs**-0.5 for _ in range(copies)]
    x = torch.randn(rows, inputs, dtype=ctx.dtype, device=ctx.device)
    options: dict[str, Any] = {"gate": gate, "eps": 1e-5}
    if extra != "residual":
        options["norm"] = torch.ones(inputs, dtype=ctx.dtype, device=ctx.device)
    else:
        options["residual"] = torch.randn(rows, outputs, dtype=ctx.dtype, device=ctx.device)

    def ms(function: Any, **more: Any) -> float:
        calls = [lambda weight=weight: function(x, weight, **options, **more) for weight in weights]
        return captured_ms(calls, ctx.device)

    def report(what: str, time: float, label: str = "") -> None:
        ctx.row(f"{name} x {rows}", what, bytes_ / (time / 1000) / ctx.bandwidth, "of copy", label)

    report("torch", ms(linear_reference.linear))
    times: dict[str, tuple[Tile, float]] = {}
    shipped = tiles(rows, gate, x.element_size())
    for tile in [shipped, *variants(rows, gate, shipped)][: 2 if ctx.dry else None]:
        label = " ".join(f"{key.removeprefix('BLOCK_').removeprefix('num_')}={size}" for key, size in tile.items())
        try:
            times[label] = (tile, ms(linear, tile=tile))
        except Exception as error:
            ctx.row(f"{name} x {rows}", "tile refused", f"{label}: {type(error).__name__}"[:200])
            if not answers(ctx.device):
                raise
            continue
        if tile == shipped:
            report("shipped tile", times[label][1], label)
    if times:
        best = min(times, key=lambda label: times[label][1])
        report("best tile", times[best][1], best)
        narrow = int8_ms(ctx, x, shape, copies, options)
        ctx.row(f"{name} x {rows}", "int8 kernel / best tile", narrow / times[best][1], "of its time")
    return times


def int8_ms(ctx: Context, x: Tensor, shape: tuple[int, int], copies: int, options: dict[str, Any]) -> float:
    """Milliseconds of the same product with int8 weights; twice as many copies, so that the bytes are the same."""
    from kernels.triton import linear_int8

    weights = [torch.randint(-127, 128, shape, dtype=torch.int8, device=ctx.device) for _ in range(2 * copies)]
    scale = torch.full(shape[:1], 1e-3, device=ctx.device)
    calls = [lambda weight=weight: linear_int8.linear(x, weight, scale, **options) for weight in weights]
    return captured_ms(calls, ctx.device)


def variants(rows: int, gate: bool, shipped: Tile) -> list[Tile]:
    """Other tiles than the shipped one."""
    found: list[Tile] = []
    if rows > 16:
        # Wider tiles mean fewer programs that each read x; splitting K restores their number (split_tiles).
        split = {"BLOCK_M": shipped["BLOCK_M"], "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
        found = [split | {"SPLIT_K": parts} for parts in (1, 2, 4, 8)]
    for n, k, stages, warps in _ONE if rows == 1 else _FEW:
        if rows == 1:
            tile = {"BLOCK_N": max(1, n // 2) if gate else n, "BLOCK_K": k, "STAGES": stages, "num_warps": warps}
        else:
            tile = {"BLOCK_M": shipped["BLOCK_M"], "BLOCK_N": n, "BLOCK_K": k}
            tile |= {"num_warps": warps, "num_stages": stages}
        if tile != shipped:
            found.append(tile)
    return found
