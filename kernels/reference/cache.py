"""The torch references of kernels/triton/cache_write.py, with the same arguments; imports no triton."""

from __future__ import annotations

import torch
from torch import Tensor


def write(keys: Tensor, values: Tensor, cache: Tensor, lengths: Tensor, starts: Tensor | None = None) -> None:
    """Write keys and values at the end of each row (see kernels/triton/cache_write.py)."""
    lengths = lengths if starts is None else lengths - starts
    batch, _, queries, _ = keys.shape
    rows = torch.arange(batch, device=lengths.device)[:, None]
    places = lengths[:, None] + torch.arange(queries, device=lengths.device)
    cache[0, rows, :, places] = keys.transpose(1, 2).to(cache.dtype)
    cache[1, rows, :, places] = values.transpose(1, 2).to(cache.dtype)


def rotate_write(
    qkv: Tensor,
    cache: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """Rotate queries in place, and write rotated keys and values (see kernels/triton/cache_write.py)."""
    queries, total, dim = qkv.shape[1:]
    kv_heads = cache.shape[2]
    heads = total - 2 * kv_heads
    rotated = qkv[:, :, : heads + kv_heads].float()
    if norms is not None:
        rotated = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + eps)
        weights = [norms[0].float().expand(heads, dim), norms[1].float().expand(kv_heads, dim)]
        rotated = rotated * torch.cat(weights)
    if positions is None:
        positions = lengths[:, None] + torch.arange(queries, device=lengths.device)
    places = positions.clamp(max=cos.shape[0] - 1)
    c, n = cos[places][:, :, None], sin[places][:, :, None]
    x, y = rotated.chunk(2, dim=-1)
    rotated = torch.cat((x * c - y * n, y * c + x * n), dim=-1).to(qkv.dtype)
    qkv[:, :, :heads] = rotated[:, :, :heads]
    keys, values = rotated[:, :, heads:], qkv[:, :, heads + kv_heads :]
    write(keys.transpose(1, 2), values.transpose(1, 2), cache, lengths, starts)
