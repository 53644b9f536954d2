"""Products of a few rows with a large weight, fused with the norm, gate and residual around them.

`linear` computes y = act(norm(x) W^T) + residual for x [M, K] with M up to 64 and W [N, K] (or [2N, K], gates
above ups; act is then silu(gate) * up). With so few rows, reading W takes all the time. Norm, gate and residual
are computed in the same launch, so a layer takes only four such launches besides its attention.
reference/linear.py computes the same in torch, also for more rows. Biases and backward are not supported.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import linear as reference
from ..support import CompileFailed, needs_float32, why_unavailable
from .launch import launch

# The most rows of x, by the bytes per number of its dtype. Exact float32 products run without tensor cores, from
# registers, which hold no more than 16 rows.
MAX_ROWS = {2: 64, 4: 16}


@triton.jit
def gemv(
    x, weight, norm, residual, out, n_size, k_size, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of the only row x [K] in program j, without tensor cores; STAGES > 1 prefetches."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight + n[:, None].to(tl.int64) * k_size + k[None, :]
    live = n < n_size
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, k_size, BLOCK_K, num_stages=STAGES):
        inside = live[:, None] if EVEN else live[:, None] & (start + k < k_size)[None, :]
        w = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
        if GATE:
            up = tl.load(
                at + n_size.to(tl.int64) * k_size + start, mask=inside, other=0.0, eviction_policy="evict_first"
            )
        at_x = start + k
        value = tl.load(x + at_x) if EVEN else tl.load(x + at_x, mask=at_x < k_size, other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + at_x) if EVEN else tl.load(norm + at_x, mask=at_x < k_size, other=0.0)
            value = wide * scale.to(tl.float32)
        sums += w.to(tl.float32) * value.to(tl.float32)[None, :]
        if GATE:
            gates += up.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / k_size + eps)
        result = result * factor
    if GATE:
        result = result * tl.sigmoid(result) * (tl.sum(gates, 1) * factor)
    if RESIDUAL:
        result += tl.load(residual + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["m_size"])
def skinny(
    x, weight, norm, residual, out, m_size, n_size, k_size, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows in program j, on tensor cores."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = m < m_size
    live = n < n_size
    at_x = x + m[:, None] * k_size + k[None, :]
    at = weight + n[None, :].to(tl.int64) * k_size + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Summed over K only after the loop.
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, k_size, BLOCK_K):
        inside = start + k < k_size
        x_mask = rows[:, None] if EVEN else rows[:, None] & inside[None, :]
        w_mask = live[None, :] if EVEN else live[None, :] & inside[:, None]
        w = tl.load(at + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(at_x + start, mask=x_mask, other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + start + k) if EVEN else tl.load(norm + start + k, mask=inside, other=0.0)
            value = (wide * scale.to(tl.float32)[None, :]).to(weight.dtype.element_ty)
        if WIDEN:
            value, w = value.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(value, w, sums, input_precision=PRECISION)
        if GATE:
            up = tl.load(
                at + n_size.to(tl.int64) * k_size + start, mask=w_mask, other=0.0, eviction_policy="evict_first"
            )
            if WIDEN:
                up = up.to(tl.float32)
            gates = tl.dot(value, up, gates, input_precision=PRECISION)
    mask = rows[:, None] & live[None, :]
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / k_size + eps)[:, None]
        sums = sums * factor
        gates = gates * factor
    if GATE:
        sums = sums * tl.sigmoid(sums) * gates
    at_out = m[:, None] * n_size + n[None, :]
    if RESIDUAL:
        sums += tl.load(residual + at_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at_out, sums.to(out.dtype.element_ty), mask=mask)


def tiles(rows: int, k_size: int, gate: bool, norm: bool, itemsize: int) -> dict[str, int]:
    """Return tile sizes: of `gemv` for one row, of `skinny` for more.

    Most are the fastest of those that were tried on an H200 for SmolLM2-135M. Two sizes for 64 rows were changed
    later so that they spill less, and were compiled but not timed.
    """
    if rows == 1:
        return {"BLOCK_N": 4 if gate else 8, "BLOCK_K": 512, "STAGES": 1, "num_warps": 4}
    block_m = 16 if rows <= 16 else 64
    if itemsize == 4:
        return {"BLOCK_M": block_m, "BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    tile = {"BLOCK_M": block_m, "BLOCK_N": 32 if gate and block_m == 16 else 16, "num_warps": 4}
    if k_size < 1024 or norm:
        return tile | {"BLOCK_K": 64, "num_stages": 3 if gate and block_m == 64 else 5}
    # With 64 rows, 256 columns spill on capability 10.0, and five stages don't fit the shared memory of others.
    return tile | ({"BLOCK_K": 256, "num_stages": 5} if block_m == 16 else {"BLOCK_K": 128, "num_stages": 3})


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """Return act(norm(x) W^T) + residual as [..., N] in x's dtype.

    torch computes it if the launch could not be compiled.

    Args:
        x: [..., K] with 1 to 64 rows (16 in float32).
        weight: [N, K], or [2N, K] with a gate, in x's dtype.
        norm: [K], the weights of an RMS norm.
        gate: whether act is silu(gate) * up.
        residual: [..., N].
        tile: tile sizes instead of the default ones.

    Raises:
        ValueError: for more rows or other shapes, or if kernels can't run here.
    """
    try:
        return _linear(x, weight, norm, eps, gate, residual, tile)
    except CompileFailed:
        return reference.linear(x, weight, norm=norm, eps=eps, gate=gate, residual=residual)


def _linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    gate: bool,
    residual: Tensor | None,
    tile: dict[str, int] | None,
) -> Tensor:
    rows, k_size = x.numel() // x.shape[-1], x.shape[-1]
    n_size = weight.shape[0] // (2 if gate else 1)
    _check(x, weight, rows, residual, n_size)
    tile = tile or tiles(rows, k_size, gate, norm is not None, x.element_size())
    out = torch.empty(*x.shape[:-1], n_size, dtype=x.dtype, device=x.device)
    flags: dict[str, Any] = {
        "NORM": norm is not None,
        "GATE": gate,
        "RESIDUAL": residual is not None,
        "EVEN": k_size % tile["BLOCK_K"] == 0,
    }
    pointers = (x, weight, x if norm is None else norm, x if residual is None else residual, out)
    blocks = triton.cdiv(n_size, tile["BLOCK_N"])
    if "BLOCK_M" not in tile:
        launch(gemv, (blocks,), *pointers, n_size, k_size, eps, **flags, **tile)
    else:
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        flags |= {"PRECISION": precision, "WIDEN": needs_float32(x.dtype)}
        launch(skinny, (blocks,), *pointers, rows, n_size, k_size, eps, **flags, **tile)
    return out


def _check(x: Tensor, weight: Tensor, rows: int, residual: Tensor | None, n_size: int) -> None:
    reason = why_unavailable(x.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    max_rows = MAX_ROWS.get(x.element_size(), 0)
    if not 1 <= rows <= max_rows:
        raise ValueError(f"the kernel takes 1 to {max_rows} rows of {x.dtype}; got {rows}.")
    if x.dtype != weight.dtype or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}.")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous.")
    if residual is not None and (residual.shape[-1] != n_size or not residual.is_contiguous()):
        raise ValueError(f"a residual of shape {tuple(residual.shape)} does not fit, or is not contiguous.")
