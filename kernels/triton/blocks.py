"""Attention over one block of columns, and the sums over the columns seen so far; used by segments.py.

A program's sums over the columns that it has seen are `highest`, the highest score; `total`, the sum of the
weights 2 ** (score - highest); and `sums`, the sum of the weighted values (Milakov and Gimelshein, arXiv
1805.02867). All are float32; scores are in base 2. The functions run on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

# SINKS of plan.py: a windowed step sees the first SINKS tokens, and the tokens from `skip` on.
SINKS: tl.constexpr = tl.constexpr(64)
# MAX_TREE_TOKENS of plan.py.
MAX_TREE_TOKENS: tl.constexpr = tl.constexpr(63)
# Stands for no prefix or no position, and is greater than every prefix and position.
NONE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def visible(low, high, skip, GAP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the blocks that cover columns low..high without the gap.

    The result is the number of blocks of sinks, the column at which the other blocks begin, and the number of all
    blocks.
    """
    sinks = 0
    resume = low
    if GAP:
        sinks = tl.cdiv(tl.maximum(tl.minimum(high, SINKS) - low, 0), BLOCK_N)
        resume = tl.maximum(low, skip)
    return sinks, resume, sinks + tl.cdiv(tl.maximum(high - resume, 0), BLOCK_N)


@triton.jit
def column(i, low, sinks, resume, BLOCK_N: tl.constexpr):
    """Return the first column of block i of `visible`."""
    return tl.where(i < sinks, low + i * BLOCK_N, resume + (i - sinks) * BLOCK_N)


@triton.jit
def columns(i, low, sinks, resume, BLOCK_N: tl.constexpr):
    """Return the columns of block i of `visible`."""
    return column(i, low, sinks, resume, BLOCK_N) + tl.arange(0, BLOCK_N)


@triton.jit
def seen_by(n, last, window, skip, WINDOW: tl.constexpr, GAP: tl.constexpr):
    """Return whether queries at positions `last` see columns n; skip: where each query's gap ends."""
    seen = n <= last
    if WINDOW:
        seen = seen & (n > last - window)
    if GAP:
        seen = seen & ((n < SINKS) | (n >= skip))
    return seen


@triton.jit
def seen_in_tree(n, base, first, second, position, window, WINDOW: tl.constexpr):
    """Return whether queries at `position` see columns n, if a tree begins at column `base`.

    first, second: int32, one bit for each of the columns base to base + 31, and of the next 31, that a query sees.
    The bits of columns that the query's window hides are cleared.
    """
    inside = n - base
    # Use words of 32 bits: a block of 64-bit ones would take twice the registers.
    seen = (tl.where(inside < 32, first, second) >> (inside & 31)) & 1 != 0
    before = inside < 0
    if WINDOW:
        before = before & (n > position - window)
    return before | ((inside >= 0) & (inside < MAX_TREE_TOKENS) & seen)


@triton.jit
def sees_segment(
    segment, last, position, window, skip, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, GAP: tl.constexpr
):
    """Return whether queries at `position` may see a column of the segment; columns after `last` do not count."""
    low = segment * SEGMENT
    high = tl.minimum(low + SEGMENT - 1, last)
    if WINDOW:
        low = tl.maximum(low, position - window + 1)
    if GAP:
        return (low <= tl.minimum(high, SINKS - 1)) | (tl.maximum(low, skip) <= high)
    return low <= high


@triton.jit
def add_block(
    queries, keys_at, values_at, in_range, in_head, seen, highest, total, sums, scaling, softcap,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add a block of columns: keys at [D, N], values at [N, D]; return the new highest, total and sums."""
    keys = tl.load(keys_at, mask=in_range[None, :] & in_head[:, None], other=0.0)
    if WIDEN:
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, keys, input_precision=PRECISION) * scaling
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634) / softcap) + 1))
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    values = tl.load(values_at, mask=in_range[:, None] & in_head[None, :], other=0.0)
    if WIDEN:
        values = values.to(tl.float32)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return new_highest, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def merge_sums(highest, total, sums, more_highest, more_total, more_sums):
    """Return the highest, total and sums of two parts of the columns together."""
    new_highest = tl.maximum(highest, more_highest)
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink, more_shrink = tl.exp2(highest - base), tl.exp2(more_highest - base)
    total = total * shrink + more_total * more_shrink
    return new_highest, total, sums * shrink[:, None] + more_sums * more_shrink[:, None]


@triton.jit
def empty_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the highest, total and sums of no columns."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return highest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def store_sums(parts, peaks, totals, at, d, size, highest, total, sums, active, in_head):
    """Store a segment's sums for `merge_parts` in the rows `at`, for queries that see the segment (`active`)."""
    tl.store(peaks + at, highest, mask=active)
    tl.store(totals + at, total, mask=active)
    tl.store(parts + at[:, None] * size + d[None, :], sums, mask=active[:, None] & in_head[None, :])


@triton.jit
def store_result(out, at, d, size, total, sums, query_exists, in_head):
    """Store the attention of queries in the rows `at`. Rows beyond the last query have seen nothing."""
    result = sums / tl.where(query_exists, total, 1.0)[:, None]
    out_at = out + at[:, None] * size + d[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=query_exists[:, None] & in_head[None, :])


@triton.jit
def merge_parts(
    parts, peaks, totals, at, rows, d, size, first_segment, last_segment, query_exists, in_head,
    last, position, window, skip,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, GAP: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Return the highest, total and sums of all segments, stored by `store_sums`.

    `at` are the queries' rows of the first segment, and `rows` how many rows one segment has. UNROLLED segments
    are loaded at once, and merged one after another.
    """
    highest, total, sums = empty_sums(BLOCK_M, BLOCK_D)
    for begin in range(first_segment, last_segment + 1, UNROLLED):
        for i in tl.static_range(UNROLLED):
            seen = query_exists & sees_segment(begin + i, last, position, window, skip, SEGMENT, WINDOW, GAP)
            here = at + (begin + i) * rows
            more_highest = tl.load(peaks + here, mask=seen, other=float("-inf"))
            more_total = tl.load(totals + here, mask=seen, other=0.0)
            sums_at = parts + here[:, None] * size + d[None, :]
            more_sums = tl.load(sums_at, mask=seen[:, None] & in_head[None, :], other=0.0)
            highest, total, sums = merge_sums(highest, total, sums, more_highest, more_total, more_sums)
    return highest, total, sums
