"""The norm, gate and sum around products that torch computes, each in one launch.

`linear` computes what linear.py does, for any number of rows. `add_norm` is a sum and the norm after it, and
`gated` is silu(gate) * up. A program has one row, or a part of one, so a row's bits don't depend on other rows.
torch replaces launches that could not be compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..support import CompileFailed
from .launch import launch

# Numbers of a program of `gate`.
_BLOCK = 1024


@triton.jit
def norm(
    x, residual, weight, total, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Normalise one row [SIZE] in program (row); with RESIDUAL the sum of two rows, which goes to `total`."""
    k = tl.arange(0, BLOCK)
    inside = k < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + k
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        # The norm is that of the rounded sum.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    result = value * scale * tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(wide, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) * up for BLOCK numbers of a row [2 SIZE], gates before ups, in program (row, block)."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    gates = tl.load(wide + 2 * row * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
    ups = tl.load(wide + (2 * row + 1) * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + n, (gates * tl.sigmoid(gates) * ups).to(out.dtype.element_ty), mask=n < SIZE)


def add_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x + residual (x itself without one) and its RMS norm, for contiguous [..., K]."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    options: dict[str, Any] = {"SIZE": size, "BLOCK": block, "RESIDUAL": residual is not None}
    try:
        launch(norm, (x.numel() // size,), x, x if residual is None else residual, weight, total, out, eps,
            num_warps=min(16, max(1, block // 512)), **options,
        )  # fmt: skip
    except CompileFailed:
        total = x if residual is None else x + residual
        return total, F.rms_norm(total, (size,), weight, eps)
    return total, out


def gated(wide: Tensor) -> Tensor:
    """Return silu(gate) * up [..., N] for contiguous [..., 2N], gates before ups."""
    size = wide.shape[-1] // 2
    out = torch.empty(*wide.shape[:-1], size, dtype=wide.dtype, device=wide.device)
    try:
        launch(gate, (out.numel() // size, triton.cdiv(size, _BLOCK)), wide, out, SIZE=size, BLOCK=_BLOCK)
    except CompileFailed:
        return F.silu(wide[..., :size]) * wide[..., size:]
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Return act(norm(x) W^T) + residual, with the arguments of linear.py; torch multiplies.

    `overwrite` allows the result to replace the residual: the product then adds to it, in the same kernel.
    """
    if norm is not None:
        x = add_norm(x, norm, eps)[1]
    if residual is not None and overwrite and not gate:
        rows = x.view(-1, x.shape[-1])
        return residual.view(len(rows), -1).addmm_(rows, weight.t()).view(residual.shape)
    out = F.linear(x, weight)
    if gate:
        out = gated(out)
    return out if residual is None else out + residual
