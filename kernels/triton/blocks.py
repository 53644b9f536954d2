"""What attention does with a block of columns, and with the sums that it holds; for segments.py.

Contract: what a program holds of the columns that it has seen are `highest`, the highest score; `total`, the sum
of the weights 2 ** (score - highest); and `sums`, the sum of the weighted values: Milakov and Gimelshein, arXiv
1805.02867. All are float32; scores are in base 2. The functions run on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As _GAP_UNIT and SINKS in plan.py: a windowed step sees the first tokens and those from `skip` on.
SINKS: tl.constexpr = tl.constexpr(64)
# As MOST_TREE in plan.py.
MOST_TREE: tl.constexpr = tl.constexpr(63)
# No prefix and no position: greater than all.
NONE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def visible(low, high, skip, GAP: tl.constexpr, BLOCK_N: tl.constexpr):
    """(blocks of sinks, column at which the rest begins, all blocks) that cover low..high without the gap."""
    sinks = 0
    resume = low
    if GAP:
        sinks = tl.cdiv(tl.maximum(tl.minimum(high, SINKS) - low, 0), BLOCK_N)
        resume = tl.maximum(low, skip)
    return sinks, resume, sinks + tl.cdiv(tl.maximum(high - resume, 0), BLOCK_N)


@triton.jit
def column(i, low, sinks, resume, BLOCK_N: tl.constexpr):
    """The first column of block i of `visible`."""
    return tl.where(i < sinks, low + i * BLOCK_N, resume + (i - sinks) * BLOCK_N)


@triton.jit
def columns(i, low, sinks, resume, BLOCK_N: tl.constexpr):
    """The columns of block i of `visible`."""
    return column(i, low, sinks, resume, BLOCK_N) + tl.arange(0, BLOCK_N)


@triton.jit
def seen_by(n, last, window, skip, WINDOW: tl.constexpr, GAP: tl.constexpr):
    """Whether queries at positions `last` see columns n; skip: where each one's gap ends."""
    seen = n <= last
    if WINDOW:
        seen = seen & (n > last - window)
    if GAP:
        seen = seen & ((n < SINKS) | (n >= skip))
    return seen


@triton.jit
def seen_in_tree(n, base, first, second, position, window, WINDOW: tl.constexpr):
    """Whether queries at `position` see columns n, where a tree begins at column `base`.

    first, second: int32, what each query sees of columns base to base + 31 and of the next 31, a bit each; those
    that its window hides are cleared.
    """
    inside = n - base
    # Words of 32 bits: a block of 64-bit ones would take twice the registers.
    seen = (tl.where(inside < 32, first, second) >> (inside & 31)) & 1 != 0
    before = inside < 0
    if WINDOW:
        before = before & (n > position - window)
    return before | ((inside >= 0) & (inside < MOST_TREE) & seen)


@triton.jit
def sees(segment, last, position, window, skip, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, GAP: tl.constexpr):
    """Whether queries at `position` may see a column of the segment up to `last`."""
    low = segment * SEGMENT
    high = tl.minimum(low + SEGMENT - 1, last)
    if WINDOW:
        low = tl.maximum(low, position - window + 1)
    if GAP:
        return (low <= tl.minimum(high, SINKS - 1)) | (tl.maximum(low, skip) <= high)
    return low <= high


@triton.jit
def add(
    queries, keys_at, values_at, there, kept, seen, highest, total, sums, scaling, softcap,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add a block of columns: keys at [D, N], values at [N, D]; returns the new highest, total and sums."""
    keys = tl.load(keys_at, mask=there[None, :] & kept[:, None], other=0.0)
    if WIDEN:
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, keys, input_precision=PRECISION) * scaling
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634) / softcap) + 1))
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    values = tl.load(values_at, mask=there[:, None] & kept[None, :], other=0.0)
    if WIDEN:
        values = values.to(tl.float32)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return raised, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def join(highest, total, sums, more_highest, more_total, more_sums):
    """The highest, total and sums of two parts of the columns."""
    raised = tl.maximum(highest, more_highest)
    base = tl.where(raised == float("-inf"), 0.0, raised)
    shrink, more_shrink = tl.exp2(highest - base), tl.exp2(more_highest - base)
    total = total * shrink + more_total * more_shrink
    return raised, total, sums * shrink[:, None] + more_sums * more_shrink[:, None]


@triton.jit
def nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The highest, total and sums of no columns."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return highest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def keep(out, peaks, totals, before, m, d, size, highest, total, sums, found, kept):
    """Store a segment's sums for `merge` in the rows before + m, where they were found."""
    tl.store(peaks + before + m, highest, mask=found)
    tl.store(totals + before + m, total, mask=found)
    at = out + before * size + m[:, None] * size + d[None, :]
    tl.store(at, sums, mask=found[:, None] & kept[None, :])
