"""The products of a layer alone: our kernels at several tile sizes beside torch, in share of the copy bandwidth.

Contract: the 7.8B target's and the 310M draft's weights, with the norm, gate or sum that belongs to each, at 1, 8
and 40 rows; captured launches over as many copies of a weight as overflow the cache. What is measured here is
what `tiles` and `Plan` should say.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import linear_reference
from kernels.ragged_attention import unavailable

from .context import Context
from .timing import captured_ms

# (name, outputs, inputs, what belongs to it)
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
    """Shape by shape, at 1, 8 and 40 rows."""
    reason = unavailable("fused", ctx.device)
    if reason:
        ctx.row("products", "not run", reason)
        return
    for rows in (1,) if ctx.dry else (1, 8, 40):
        for shape in SHAPES[:1] if ctx.dry else SHAPES:
            if ctx.late:
                return
            measure(ctx, rows, *shape)


@torch.inference_mode()
def measure(ctx: Context, rows: int, name: str, outputs: int, inputs: int, extra: str) -> None:
    """One product: torch, then each tile; the best is named."""
    from kernels.linear import linear, tiles

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

    def share(function: Any, **more: Any) -> float:
        calls = [lambda weight=weight: function(x, weight, **options, **more) for weight in weights]
        return bytes_ / (captured_ms(calls, ctx.device) / 1000) / ctx.bandwidth

    case = f"{name} x {rows}"
    ctx.row(case, "torch", share(linear_reference.linear), "of copy")
    best: tuple[float, str] = (0.0, "none")
    shipped = tiles(rows, gate, x.element_size())
    for tile in [shipped, *([] if ctx.dry else variants(rows, gate, shipped))]:
        label = " ".join(f"{key.removeprefix('BLOCK_').removeprefix('num_')}={size}" for key, size in tile.items())
        try:
            best = max(best, (share(linear, tile=tile), label))
        except Exception as error:
            ctx.row(case, "tile failed", f"{label}: {type(error).__name__}"[:200])
            continue
        if tile == shipped:
            ctx.row(case, "shipped tile", best[0], "of copy", label)
    ctx.row(case, "best tile", best[0], "of copy", best[1])


def variants(rows: int, gate: bool, shipped: dict[str, int]) -> list[dict[str, int]]:
    """Other tiles than the shipped one."""
    found: list[dict[str, int]] = []
    for n, k, stages, warps in _ONE if rows == 1 else _FEW:
        if rows == 1:
            tile = {"BLOCK_N": max(1, n // 2) if gate else n, "BLOCK_K": k, "STAGES": stages, "num_warps": warps}
        else:
            tile = {"BLOCK_M": shipped["BLOCK_M"], "BLOCK_N": n, "BLOCK_K": k}
            tile |= {"num_warps": warps, "num_stages": stages}
        if tile != shipped:
            found.append(tile)
    return found
