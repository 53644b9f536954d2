"""kernels/triton/linear.py for 8-bit weights: read as bytes, converted in registers, scaled once at the end.

Contract: y = act((norm(x) Q^T) * scale) + residual for x [M, K] with M up to 64, Q int8 [N, K] (or [2N, K]: gate
above up) and one float32 scale for each of its rows. Every int8 value is exact in every dtype that x may have, so
the products equal those of the converted weight. reference/linear.py computes the same in torch. It reads half the
bytes of bfloat16, but has not been measured on a GPU yet, so it is off unless BASS_INT8_KERNELS=1
(bass_core/models/llama_int8.py). Non-goals: biases, backward, groups within a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import why_unavailable, widens

# The most rows of x by the bytes of its dtype, as in linear.py: float32 is multiplied without tensor cores.
MOST_ROWS = {2: 64, 4: 16}


@triton.jit
def gemv_int8(
    x, weight, scale, norm, residual, out, n_size, k_size, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program j: BLOCK_N outputs of the only row x [K], without tensor cores."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight + n[:, None].to(tl.int64) * k_size + k[None, :]
    live = n < n_size
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, k_size, BLOCK_K):
        inside = live[:, None] if EVEN else live[:, None] & (start + k < k_size)[None, :]
        w = tl.load(at + start, mask=inside, other=0, eviction_policy="evict_first")
        at_x = start + k
        value = tl.load(x + at_x, mask=at_x < k_size, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + at_x, mask=at_x < k_size, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * value[None, :]
        if GATE:
            at_up = at + n_size.to(tl.int64) * k_size + start
            up = tl.load(at_up, mask=inside, other=0, eviction_policy="evict_first")
            gates += up.to(tl.float32) * value[None, :]
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / k_size + eps)
    result = tl.sum(sums, 1) * (tl.load(scale + n, mask=live, other=0.0) * factor)
    if GATE:
        up_scale = tl.load(scale + n_size + n, mask=live, other=0.0) * factor
        result = result * tl.sigmoid(result) * (tl.sum(gates, 1) * up_scale)
    if RESIDUAL:
        result += tl.load(residual + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["m_size"])
def skinny_int8(
    x, weight, scale, norm, residual, out, m_size, n_size, k_size, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program j: BLOCK_N outputs of all rows, on tensor cores."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = m < m_size
    live = n < n_size
    at_x = x + m[:, None] * k_size + k[None, :]
    at = weight + n[None, :].to(tl.int64) * k_size + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, k_size, BLOCK_K):
        inside = start + k < k_size
        x_mask = rows[:, None] if EVEN else rows[:, None] & inside[None, :]
        w_mask = live[None, :] if EVEN else live[None, :] & inside[:, None]
        w = tl.load(at + start, mask=w_mask, other=0, eviction_policy="evict_first")
        value = tl.load(at_x + start, mask=x_mask, other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            factors = tl.load(norm + start + k, mask=inside, other=0.0).to(tl.float32)
            value = (wide * factors[None, :]).to(x.dtype.element_ty)
        if WIDEN:
            value = value.to(tl.float32)
        sums = tl.dot(value, w.to(value.dtype), sums, input_precision=PRECISION)
        if GATE:
            at_up = at + n_size.to(tl.int64) * k_size + start
            up = tl.load(at_up, mask=w_mask, other=0, eviction_policy="evict_first")
            gates = tl.dot(value, up.to(value.dtype), gates, input_precision=PRECISION)
    sums = sums * tl.load(scale + n, mask=live, other=0.0)[None, :]
    if GATE:
        gates = gates * tl.load(scale + n_size + n, mask=live, other=0.0)[None, :]
    if NORM:
        factor = tl.rsqrt(squares / k_size + eps)[:, None]
        sums = sums * factor
        gates = gates * factor
    if GATE:
        sums = sums * tl.sigmoid(sums) * gates
    at_out = m[:, None] * n_size + n[None, :]
    mask = rows[:, None] & live[None, :]
    if RESIDUAL:
        sums += tl.load(residual + at_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at_out, sums.to(out.dtype.element_ty), mask=mask)


def tiles(rows: int, gate: bool, itemsize: int) -> dict[str, int]:
    """Tile sizes for `rows` rows of x with elements of `itemsize` bytes; the tests compile them all."""
    if rows == 1:
        # With BLOCK_K = 1024, triton 3.9 spills registers on Blackwell.
        return {"BLOCK_N": 4 if gate else 8, "BLOCK_K": 512, "num_warps": 4}
    block_m = 16 if rows <= 16 else 64
    if itemsize == 4:
        return {"BLOCK_M": block_m, "BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    wide = 16 if gate or block_m == 16 else 32
    return {"BLOCK_M": block_m, "BLOCK_N": wide, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """act((norm(x) Q^T) * scale) + residual as [..., N] in x's dtype.

    x [..., K] of 1 to 64 rows (16 in float32); weight int8 [N, K], or [2N, K] with gate; scale: float32, one for
    each row of the weight; norm [K]: weights of an RMS norm; residual [..., N]. `tile` replaces the default sizes.
    Raises ValueError for more rows, other shapes and dtypes, or where kernels can't run.
    """
    rows, k_size = x.numel() // x.shape[-1], x.shape[-1]
    n_size = weight.shape[0] // (2 if gate else 1)
    _check(x, weight, scale, rows, residual, n_size)
    tile = tile or tiles(rows, gate, x.element_size())
    out = torch.empty(*x.shape[:-1], n_size, dtype=x.dtype, device=x.device)
    flags: dict[str, Any] = {
        "NORM": norm is not None,
        "GATE": gate,
        "RESIDUAL": residual is not None,
        "EVEN": k_size % tile["BLOCK_K"] == 0,
    }
    pointers = (x, weight, scale, x if norm is None else norm, x if residual is None else residual, out)
    grid = (triton.cdiv(n_size, tile["BLOCK_N"]),)
    if "BLOCK_M" not in tile:
        gemv_int8[grid](*pointers, n_size, k_size, eps, **flags, **tile)
    else:
        flags |= {"PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "WIDEN": widens(x.dtype)}
        skinny_int8[grid](*pointers, rows, n_size, k_size, eps, **flags, **tile)
    return out


def _check(x: Tensor, weight: Tensor, scale: Tensor, rows: int, residual: Tensor | None, n_size: int) -> None:
    reason = why_unavailable(x.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    most = MOST_ROWS.get(x.element_size(), 0)
    if not 1 <= rows <= most:
        raise ValueError(f"the kernel takes 1 to {most} rows of {x.dtype}; got {rows}.")
    if weight.dtype != torch.int8 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} {weight.dtype}.")
    if scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        raise ValueError(f"each of {weight.shape[0]} rows needs a float32 scale; got {tuple(scale.shape)}.")
    if not (x.is_contiguous() and weight.is_contiguous() and scale.is_contiguous()):
        raise ValueError("x, weight and scale must be contiguous.")
    if residual is not None and (residual.shape[-1] != n_size or not residual.is_contiguous()):
        raise ValueError(f"a residual of shape {tuple(residual.shape)} does not fit, or is not contiguous.")
