"""Write the new keys and values of all rows to the cache, each at the end of its row, in one launch.

`write` stores finished keys and values. `rotate_write` reads a layer's joined QKV product [B, S, Hq + 2 Hkv, D],
normalises the heads if the architecture does, rotates queries (in place) and keys, and stores keys and values: one
pass instead of torch's four. Token s of row b is at position lengths[b] + s, or in a tree (TreeMask in plan.py)
at positions[b, s]. In both cases it is written to column lengths[b] + s of its row, of which the first starts[b]
are in a prefix.

The torch references in reference/cache.py also replace launches that could not be compiled. Not supported: rotary
embeddings of only a part of a head, or with factors that depend on the text's length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import cache as reference
from ..support import CompileFailed, why_unavailable
from .launch import launch
from .rotary import rotated

# Tokens of a program of `rotate`. With so many, a thread of a warp has as many numbers of a head as in attention,
# and so sums the squares of a head in the same order.
_TOKENS = 4


@triton.jit(do_not_specialize=["queries"])
def put(
    keys, values, cache, lengths, starts, queries, k_b, k_h, k_s, v_b, v_h, v_s, c_kv, c_b, c_h, c_n,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Copy one key and one value to the end of their row, in program (token, head)."""
    row = (tl.program_id(0) // queries).to(tl.int64)
    s = tl.program_id(0) % queries
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    place = tl.load(lengths + row) + s
    if SHARED:
        place -= tl.load(starts + row)
    at = cache + row * c_b + head * c_h + place * c_n + d
    key = tl.load(keys + row * k_b + head * k_h + s * k_s + d, mask=d < DIM)
    value = tl.load(values + row * v_b + head * v_h + s * v_s + d, mask=d < DIM)
    tl.store(at, key.to(cache.dtype.element_ty), mask=d < DIM)
    tl.store(at + c_kv, value.to(cache.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["queries", "tokens", "last_position"])
def rotate(
    qkv, cache, lengths, starts, positions, cos, sin, q_norm, k_norm, queries, tokens, last_position, eps,
    c_kv, c_b, c_h, c_n,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    NORM: tl.constexpr, SHARED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store one head of q, k or v of BLOCK_T tokens, in program (block of tokens, head)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < tokens
    row = token // queries
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < DIM)[None, :]
    at = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    position = tl.load(lengths + row, mask=exists, other=0) + token % queries
    place = position
    if TREE:
        position = tl.load(positions + token, mask=exists, other=0)
    if SHARED:
        place -= tl.load(starts + row, mask=exists, other=0)
    kv_head = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    to = cache + row * c_b + kv_head * c_h + place * c_n + tl.where(is_value, c_kv, 0)
    if is_value:
        value = tl.load(at[:, None] + d[None, :], mask=mask)
        tl.store(to[:, None] + d[None, :], value.to(cache.dtype.element_ty), mask=mask)
    else:
        weight = q_norm
        if head >= HEADS:
            weight = k_norm
        turned = rotated(at, exists, position, last_position, cos, sin, weight, d, DIM, eps, NORM)
        turned = turned.to(qkv.dtype.element_ty)
        # All threads have read the heads before one of them overwrites them.
        tl.debug_barrier()
        if head < HEADS:
            tl.store(at[:, None] + d[None, :], turned, mask=mask)
        else:
            tl.store(to[:, None] + d[None, :], turned.to(cache.dtype.element_ty), mask=mask)


def write(keys: Tensor, values: Tensor, cache: Tensor, lengths: Tensor, starts: Tensor | None = None) -> None:
    """Write keys and values [B, Hkv, S, D] at the end of each row of the cache.

    Args:
        cache: [2, >=B, Hkv, L, D]; L is not checked.
        lengths: int64 [B], cached tokens of each row.
        starts: int64 [B], how many tokens of each row are in a prefix; None: none.
    """
    _check(keys, cache, lengths, starts)
    batch, heads, queries, dim = keys.shape
    if keys.stride(3) != 1 or values.stride(3) != 1 or keys.shape != values.shape:
        raise ValueError("keys and values must be alike and contiguous in their last dimension.")
    try:
        launch(put, (batch * queries, heads),
            keys, values, cache, lengths, lengths if starts is None else starts, queries,
            *keys.stride()[:3], *values.stride()[:3], *cache.stride()[:4],
            DIM=dim, BLOCK_D=triton.next_power_of_2(dim), SHARED=starts is not None, num_warps=1,
        )  # fmt: skip
    except CompileFailed:
        reference.write(keys, values, cache, lengths, starts)


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
    """Rotate the queries of `qkv` in place; write rotated keys, and values, to the cache.

    Args:
        qkv: [B, S, Hq + 2 Hkv, D], contiguous.
        cache, lengths, starts: as for `write`.
        cos, sin: float32 [positions, D / 2]; the last entry serves all later positions.
        norms: weights [D] of the RMS norms of queries and keys, or None.
        positions: int64 [B, S] of the tokens of trees; None if each token follows the one before it.
    """
    _check(qkv, cache, lengths, starts)
    batch, queries, total, dim = qkv.shape
    kv_heads = cache.shape[2]
    if not qkv.is_contiguous() or dim % 2 or cos.shape[1] * 2 != dim or cos.dtype != torch.float32:
        raise ValueError("qkv must be contiguous, with an even head_dim, and cos and sin float32 of half of it.")
    if positions is not None and positions.shape != (batch, queries):
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not fit {batch} x {queries} tokens.")
    q_norm, k_norm = norms or (cos, cos)
    try:
        launch(rotate, (triton.cdiv(batch * queries, _TOKENS), total),
            qkv, cache, lengths, lengths if starts is None else starts,
            lengths if positions is None else positions.contiguous(), cos, sin, q_norm, k_norm,
            queries, batch * queries, cos.shape[0] - 1, eps, *cache.stride()[:4],
            HEADS=total - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_T=_TOKENS, NORM=norms is not None, SHARED=starts is not None, TREE=positions is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    except CompileFailed:
        reference.rotate_write(qkv, cache, lengths, cos, sin, norms, eps, starts, positions)


def _check(states: Tensor, cache: Tensor, lengths: Tensor, starts: Tensor | None) -> None:
    reason = why_unavailable(states.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    if cache.stride(4) != 1 or cache.shape[4] != states.shape[3] or lengths.shape != states.shape[:1]:
        raise ValueError(f"a cache of shape {tuple(cache.shape)} does not fit states {tuple(states.shape)}.")
    if starts is not None and starts.shape != lengths.shape:
        raise ValueError(f"{len(starts)} starts do not fit {len(lengths)} rows.")
