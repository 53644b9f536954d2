"""Ragged attention in one launch or two: what BASS-SPLIT computes, with no more launches than BASS-PAD.

Contract: the same arguments and result as `pad` in backends.py, which is the torch reference. Lengths are
read on the device, so that a captured launch serves every later step. fp16, bf16 and fp32; head_dim up to 256.
Each program takes a block of the query rows of one key-value head, (g, s) folded into one axis, and a part of the
columns that any of these rows may see. A second launch merges the parts by their log-sum-exps (Milakov and
Gimelshein, arXiv 1805.02867; flash-decoding). Where the rows alone fill the device, as in a prefill, columns are
not split and one launch is enough.
Non-goals: backward, dropout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan import AttentionPlan
from ..support import has_tensor_cores, processors, shared_bytes, why_unavailable, widens

# Columns are split until each multiprocessor has this many programs.
_PROGRAMS_PER_PROCESSOR = 3
_MOST_SPLITS = 32


# Not specialised on these values, so that new ones do not compile the kernel again.
@triton.jit(do_not_specialize=["queries", "window", "splits"])
def attend(
    q, k, v, lengths, out, lse,
    q_b, q_h, q_s, k_b, k_h, k_n, v_b, v_h, v_n,
    scaling, softcap, queries, window, splits, dim,
    HEADS: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (block of rows x split, kv head, batch row): attention over its columns, and their log-sum-exp.

    Writes out float32 [splits, B, S, Hq, D] and lse float32 [splits, B, S, Hq] (base 2). WHOLE: there is one
    split, out [B, S, Hq, D] is the result in its own dtype, and lse is not written.
    """
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    s = m % queries
    g = m // queries
    real = m < queries * GROUP
    d = tl.arange(0, BLOCK_D)
    # Head dimensions that are not powers of two share a kernel, with the elements beyond `dim` masked.
    size = BLOCK_D if EXACT else dim
    kept = d < size
    hq = head * GROUP + g
    q_at = q + row * q_b + hq[:, None] * q_h + s[:, None] * q_s + d[None, :]
    queries_ = tl.load(q_at, mask=real[:, None] & kept[None, :], other=0.0).to(k.dtype.element_ty)
    if WIDEN:
        queries_ = queries_.to(tl.float32)
    last = length + s

    # Skip columns that no row of this block sees: in a prefill, half of all. A block that reaches into the next
    # head contains both the last queries and the first.
    query = block * BLOCK_M % queries
    first = 0
    if WINDOW:
        first = tl.where(query + BLOCK_M <= queries, length + query, length) - window + 1
        first = tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    end = length + tl.minimum(query + BLOCK_M, queries)
    share = tl.cdiv(tl.cdiv(end - first, BLOCK_N), splits) * BLOCK_N
    low = first + split * share
    high = tl.minimum(low + share, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_at = k + row * k_b + head.to(tl.int64) * k_h
    v_at = v + row * v_b + head.to(tl.int64) * v_h
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = tl.load(
            k_at + n[None, :].to(tl.int64) * k_n + d[:, None], mask=(n < end)[None, :] & kept[:, None], other=0.0
        )
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries_, keys, input_precision=PRECISION) * scaling
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634) / softcap) + 1))
        seen = n[None, :] <= last[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        values = tl.load(
            v_at + n[:, None].to(tl.int64) * v_n + d[None, :], mask=(n < end)[:, None] & kept[None, :], other=0.0
        )
        if WIDEN:
            values = values.to(tl.float32)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = raised

    o_row = (split * tl.num_programs(2) + row) * queries * HEADS + s * HEADS + hq
    written = real
    if not WHOLE:
        tl.store(lse + o_row, tl.where(total == 0.0, float("-inf"), highest + tl.log2(total)), mask=real)
        # A part without columns is not written: `merge` gives it weight 0.
        written = real & (total > 0.0)
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + o_row[:, None] * size + d[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=written[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["splits", "rows"])
def merge(
    parts, lse, out, splits, rows, dim,
    EXACT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program r merges row r of `parts` float32 [splits, rows, D], weighted by 2 ** lse [splits, rows]."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    size = BLOCK_D if EXACT else dim
    weights = tl.load(lse + split * rows + row, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(weights - tl.max(weights, 0))
    at = (split[:, None].to(tl.int64) * rows + row) * size + d[None, :]
    # A part without columns was never written, so it must not be read.
    part = tl.load(parts + at, mask=(weights > 0.0)[:, None] & (d < size)[None, :], other=0.0)
    joined = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * size + d, joined.to(out.dtype.element_ty), mask=d < size)


def tiles(
    head_dim: int, rows: int, itemsize: int, shared: int = 99 * 1024, tensor_cores: bool = True
) -> dict[str, int]:
    """Tile sizes of `attend`. rows: group x queries of one key-value head; itemsize: bytes of a key element.

    shared: bytes of shared memory that a program may use. The tests compile every size for every architecture and
    check for register spills.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    plain = itemsize == 4 or not tensor_cores
    if plain:
        # Products without tensor cores run from registers: exact float32 ones, and all on old devices.
        block_m, choices = 16, [(32, 2)] if block_d <= 128 else [(16, 2)]
    else:
        block_m = 16 if rows <= 16 else 64
        choices = [(64, 3), (64, 2), (32, 2), (16, 2)] if block_d <= 128 else [(32, 2), (16, 2)]
    needed = {
        (n, stages): (block_m * block_d + stages * 2 * n * block_d) * itemsize + 2048 for n, stages in choices
    }
    block_n, stages = next((pair for pair in choices if needed[pair] <= shared), choices[-1])
    # With four warps, some Triton versions spill registers in float32 at head_dim 128 and above.
    warps = 8 if (block_m == 64 and block_d >= 128) or (plain and block_d >= 128) else 4
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps, "num_stages": stages}


def splits_for(device: torch.device, programs: int, columns: int, block_n: int) -> int:
    """How many parts to split the columns into, so that `programs` times as many programs fill the device."""
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors(device), programs)
    return max(1, min(wanted, triton.cdiv(columns, block_n), _MOST_SPLITS))


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """query [B, Hq, S, D]; key, value [B, Hkv, columns, D]; returns [B, S, Hq, D] in the query's dtype.

    `splits` fixes the number of parts (for tests); None lets `splits_for` choose. Raises ValueError for shapes
    and dtypes outside the contract, and where kernels can't run.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    _check(query, key, value, plan)
    group = heads // kv_heads
    shared, cores = shared_bytes(query.device), has_tensor_cores(query.device)
    tile = tiles(dim, group * queries, key.element_size(), shared, cores)
    blocks = triton.cdiv(group * queries, tile["BLOCK_M"])
    if splits is None:
        splits = splits_for(query.device, blocks * kv_heads * batch, columns, tile["BLOCK_N"])
    out = torch.empty(batch, queries, heads, dim, dtype=query.dtype, device=query.device)
    rows = batch * queries * heads
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(splits, rows, dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, rows, dtype=torch.float32, device=query.device)
    attend[(blocks * splits, kv_heads, batch)](
        query, key, value, plan.lengths, parts, lse,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        scaling, softcap or 1.0, queries, window or 0, splits, dim,
        HEADS=heads, GROUP=group, EXACT=dim == tile["BLOCK_D"],
        WINDOW=window is not None, SOFTCAP=softcap is not None, WHOLE=splits == 1,
        PRECISION="ieee" if key.dtype == torch.float32 else "tf32", WIDEN=widens(key.dtype), **tile,
    )  # fmt: skip
    if splits > 1:
        merge[(rows,)](
            parts, lse, out, splits, rows, dim,
            EXACT=dim == tile["BLOCK_D"], BLOCK_D=tile["BLOCK_D"],
            BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


def _check(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> None:
    reason = why_unavailable(query.device)
    if reason:
        raise ValueError(f"fused attention can't run: {reason}.")
    batch, heads, queries, dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != dim or heads % key.shape[1]:
        raise ValueError(f"shapes don't fit: query {tuple(query.shape)}, key {tuple(key.shape)}.")
    if not 1 <= dim <= 256 or queries != plan.queries or plan.lengths.shape != (batch,):
        raise ValueError(f"head_dim {dim} (at most 256) or the step's size ({plan.queries} queries) doesn't fit.")
    if key.dtype not in (torch.float16, torch.bfloat16, torch.float32) or key.dtype != value.dtype:
        raise ValueError(f"keys and values must be float16, bfloat16 or float32, both alike; got {key.dtype}.")
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        raise ValueError("the last dimension of query, key and value must be contiguous.")
