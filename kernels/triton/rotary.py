"""Rotary embedding on the device: RoFormer's, of pairs i and i + D / 2, after the heads' norm if there is one.

`rotated` is the only place that rotates, so keys have the same bits whether attention or `rotate` (cache_write.py)
wrote them. Compile its callers with enable_fp_fusion=False: fused multiply-adds would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(at, exists, position, last_position, cos, sin, weight, d, size, eps, NORM: tl.constexpr):
    """Return float32 [R, BLOCK_D], the heads at `at` [R] normalised and rotated; 0 if they don't exist.

    Args:
        position: int [R]; those after `last_position` are rotated as it is.
        cos, sin: float32 [positions, D / 2].
        weight: [D] of the norm; not read without NORM.
        d: arange of BLOCK_D.
        size: D, an even number.
    """
    half = size // 2
    # Remainders, since Triton sees that they are contiguous, and then loads several elements at once.
    partner, angle = (d + half) % size, d % half
    mask = exists[:, None] & (d < size)[None, :]
    x = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
        x = x * scale * tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)[None, :]
        y = y * scale * tl.load(weight + partner, mask=d < size, other=0.0).to(tl.float32)[None, :]
    angle_at = tl.minimum(position, last_position)[:, None] * half + angle[None, :]
    c = tl.load(cos + angle_at, mask=mask, other=0.0)
    n = tl.load(sin + angle_at, mask=mask, other=0.0)
    return x * c + tl.where((d < half)[None, :], -y, y) * n
