"""Distributions over whole vocabularies: softmax, top-k, top-p and min-p of one row of logits.

`distribution_row` computes a row's distribution, on one thread and in a fixed order. So its bits do not depend on
other rows or the number of threads. A row with NaN, +inf or nothing finite becomes NaN. `kept_row` computes the
same probabilities, but writes only those of the tokens that top-p keeps.

top-k and top-p don't sort: they select their threshold digit by digit (radix selection) from the bits of the few
candidates.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..calls.jit import address_of, helper, kernel
from ..calls.threads import claim, done, wait
from ..elements import bits, exp, number

# How many numbers are in a chunk, and how many partial sums or maxima we keep for each chunk.
CHUNK, LANES = 4096, 64
# Number of buckets in a radix search (`_rank`): one for each value of an 11-bit digit.
_BUCKETS = 2048
# The search for top-p's threshold first looks only at tokens that are at least this likely: in a language model
# the others have hardly any mass.
_LIKELY = np.float32(2.0**-13)
# A generous bound of the rounding error in the sum of a softmax, which would be 1 without rounding.
_SLACK = 1e-4
_FLOATS, _FLOAT64S = (types.Array(number, 1, "C") for number in (types.float32, types.float64))
# Types of the arguments of `distribution_row`.
_ROW_CALL = types.void(
    _FLOATS, types.intp, types.intp, types.Tuple((types.float32, types.int64, types.float32, types.float32)),
    _FLOATS, types.intp, types.Tuple((_FLOATS, _FLOAT64S, _FLOATS)),
)  # fmt: skip
# What `kept_row` returns if it has written the probabilities of all tokens.
ALL = np.int64(-1)


@helper
def scratch_for(size):
    """Return scratch for rows of `size` numbers: lanes, buckets, and selected numbers."""
    return np.empty(LANES, np.float32), np.empty(_BUCKETS, np.float64), np.empty(size + LANES, np.float32)


@helper
def probability_of(p, tokens, at, count, token):
    """Return the probability of a token in a distribution that `kept_row` has written; see there."""
    if count == ALL:
        return p[at + token]
    low, high = at, at + count
    while low < high:
        middle = (low + high) // 2
        if tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    return p[low] if low < at + count and tokens[low] == token else np.float32(0.0)


@helper
def _largest(x, start, size, lanes):
    """Return the largest of x[start : start + size], ignoring NaN. Leaves maxima of disjoint parts in `lanes`."""
    num_lanes, whole = np.uintp(LANES), np.uintp(size) // np.uintp(LANES)
    for j in range(num_lanes):
        lanes[j] = np.float32(-np.inf)
    for i in range(whole):
        at = np.uintp(start) + i * num_lanes
        for j in range(num_lanes):
            lanes[j] = x[at + j] if x[at + j] > lanes[j] else lanes[j]
    at = np.uintp(start) + whole * num_lanes
    for j in range(np.uintp(size) - whole * num_lanes):
        lanes[j] = x[at + j] if x[at + j] > lanes[j] else lanes[j]
    largest_lane = lanes[0]
    for j in range(num_lanes):
        largest_lane = lanes[j] if lanes[j] > largest_lane else largest_lane
    return largest_lane


@helper
def _exponentials(x, start, size, top, factor, floor, out, to, lanes):
    """Write exp((x - top) * factor), or 0 if x < floor, to out[to : to + size]; return the sum."""
    num_lanes, whole, zero = np.uintp(LANES), np.uintp(size) // np.uintp(LANES), np.float32(0.0)
    for j in range(num_lanes):
        lanes[j] = zero
    for i in range(whole):
        at, into = np.uintp(start) + i * num_lanes, np.uintp(to) + i * num_lanes
        for j in range(num_lanes):
            value = exp((x[at + j] - top) * factor)
            out[into + j] = zero if x[at + j] < floor else value
        for j in range(num_lanes):
            lanes[j] += out[into + j]
    at, into = np.uintp(start) + whole * num_lanes, np.uintp(to) + whole * num_lanes
    for j in range(np.uintp(size) - whole * num_lanes):
        value = exp((x[at + j] - top) * factor)
        out[into + j] = zero if x[at + j] < floor else value
        lanes[j] += out[into + j]
    total = 0.0
    for j in range(num_lanes):
        total += lanes[j]
    return total


@helper
def _select(x, start, size, bar, selected):
    """Write the numbers of x[start : start + size] from `bar` up to `selected`, in order; return how many."""
    count, num_lanes = np.uintp(0), np.uintp(LANES)
    for first in range(np.uintp(0), np.uintp(size), num_lanes):
        at, few = np.uintp(start) + first, min(num_lanes, np.uintp(size) - first)
        any_above = False
        for j in range(few):
            any_above |= x[at + j] >= bar
        if any_above:
            for j in range(few):
                selected[count] = x[at + j]
                count += np.uintp(x[at + j] >= bar)
    return count


@helper
def _rank(values, count, place, buckets):
    """Return the number at `place` (1: the largest) among the first `count` values, none of which is NaN."""
    prefix, above = np.uint32(0), 0.0
    for shift in (21, 10, 0):
        digit = np.uint32(_BUCKETS - 1 if shift else 1023)
        buckets[:] = 0.0
        for i in range(count):
            key = _ordered(values[np.uintp(i)])
            if shift == 21 or key >> np.uint32(21 if shift == 10 else 10) == prefix:
                buckets[np.uintp((key >> np.uint32(shift)) & digit)] += 1.0
        bucket = int(digit)
        while bucket > 0 and above + buckets[bucket] < place:
            above += buckets[bucket]
            bucket -= 1
        prefix = np.uint32((prefix << np.uint32(11 if shift else 10)) | np.uint32(bucket))
    sign = np.uint32(0x80000000)
    return number(np.int32(prefix ^ sign if prefix & sign else ~prefix))


@helper
def _ordered(value):
    """Return the bits of a number as a word that sorts like the number."""
    word, sign = np.uint32(bits(value)), np.uint32(0x80000000)
    return np.uint32(~word) if word & sign else np.uint32(word | sign)


@helper
def _nucleus(p, start, size, top_p, buckets, selected):
    """Return (threshold, mass): top-p keeps the tokens from `threshold` up, which have that mass.

    The threshold is the largest probability for which the mass of the tokens at least that likely, rounded to
    float32, reaches top_p; 0 if none does. Masses are float64 sums, which are exact for all that matters here:
    probabilities above 2**-29 are multiples of 2**-52.
    """
    lower_bound = _lowest_threshold(size, top_p)
    bar, count, mass = max(_LIKELY, lower_bound), np.uintp(0), 0.0
    while True:
        count, mass = _select(p, start, size, bar, selected), 0.0
        for i in range(count):
            mass += np.float64(selected[i])
        if np.float32(mass) >= top_p:
            break
        if bar <= np.float32(0.0):
            return np.float32(0.0), mass
        bar = lower_bound if bar > lower_bound else np.float32(0.0)
    return _threshold(selected, count, top_p, buckets)


@helper
def _lowest_threshold(size, top_p):
    """Return a lower bound of top-p's threshold: less likely tokens have a mass of at least 1 - top_p together."""
    return np.float32(max(0.0, 1 - _SLACK - top_p) / size)


@helper
def _threshold(selected, count, top_p, buckets):
    """Return `_nucleus` of the first `count` selected probabilities, whose mass reaches top_p."""
    prefix, above, reached = np.uint32(0), 0.0, 0.0
    for shift in (20, 10, 0):
        buckets[:1024] = 0.0
        for i in range(count):
            word = np.uint32(bits(selected[i]))
            if shift == 20 or word >> np.uint32(shift + 10) == prefix:
                buckets[np.uintp((word >> np.uint32(shift)) & np.uint32(1023))] += np.float64(selected[i])
        bucket = 1023
        while bucket > 0 and np.float32(above + buckets[bucket]) < top_p:
            above += buckets[bucket]
            bucket -= 1
        prefix, reached = np.uint32((prefix << np.uint32(10)) | np.uint32(bucket)), above + buckets[bucket]
    return number(np.int32(prefix)), reached


@helper
def _divide_kept(p, start, size, bar, total):
    """Divide the numbers of p[start : start + size] from `bar` up by `total`, in place; zero the others."""
    num_lanes, zero = np.uintp(LANES), np.float32(0.0)
    for first in range(np.uintp(0), np.uintp(size), num_lanes):
        at, few = np.uintp(start) + first, min(num_lanes, np.uintp(size) - first)
        any_above = False
        for j in range(few):
            any_above |= p[at + j] >= bar
        if any_above:
            for j in range(few):
                p[at + j] = p[at + j] / total if p[at + j] >= bar else zero
        else:
            for j in range(few):
                p[at + j] = zero


@helper
def _top_and_floor(x, start, size, top_k, scratch):
    """Return the largest of x[start : start + size], and the smallest number that top-k keeps."""
    lanes, buckets, selected = scratch
    floor = top = np.float32(-np.inf)
    parts = 0
    for first in range(0, size, CHUNK):
        top = max(top, _largest(x, start + first, min(CHUNK, size - first), lanes))
        if 0 < top_k < size:
            for j in range(min(LANES, size - parts)):
                selected[parts + j] = lanes[j]
            parts += LANES
    if 0 < top_k < size:
        # At least top_k numbers are as large as the top_k-th largest maximum of the parts.
        bar = _rank(selected, min(parts, size), top_k, buckets) if top_k <= min(parts, size) else floor
        count = _select(x, start, size, bar, selected)
        # Fewer than top_k numbers are selected only if some logits are NaN, and then the whole row becomes NaN.
        floor = _rank(selected, count, top_k, buckets) if count >= top_k else floor
    return top, floor


@helper
def distribution_row(x, start, size, filters, out, to, scratch):
    """Write the distribution of x[start : start + size] to out[to : to + size]; return whether it is sound.

    x: logits. filters: (1 / temperature, top_k or 0, top_p, min_p), as in SamplingParams. scratch: see
    `scratch_for`.
    """
    factor, top_k, top_p, min_p = filters
    lanes, buckets, selected = scratch
    top, floor = _top_and_floor(x, start, size, top_k, scratch)
    total = 0.0
    for first in range(0, size, CHUNK):
        few = min(CHUNK, size - first)
        total += _exponentials(x, start + first, few, top, factor, floor, out, to + first, lanes)
    share, into = np.float32(1.0 / total), np.uintp(to)
    for i in range(np.uintp(size)):
        out[into + i] *= share
    if share != share:
        return False
    if top_p < np.float32(1.0):
        threshold, mass = _nucleus(out, to, size, top_p, buckets, selected)
        _divide_kept(out, to, size, threshold, np.float32(mass))
        share /= np.float32(mass)
    if min_p > np.float32(0.0):
        count, mass = _select(out, to, size, min_p * share, selected), 0.0
        for i in range(count):
            mass += np.float64(selected[i])
        _divide_kept(out, to, size, min_p * share, np.float32(mass))
    return True


def _row(x, start, size, filters, out, to, scratch):
    distribution_row(x, start, size, filters, out, to, scratch)


@cache
def address_of_row() -> int:
    """Return the address of `distribution_row`, for `call_row`."""
    return address_of(_row, _ROW_CALL)


@intrinsic
def call_row(
    _: Any, address: Any, x: Any, start: Any, size: Any, filters: Any, out: Any, to: Any, scratch: Any
) -> Any:
    """Call `distribution_row` by its address: a kernel that contained it would take seconds longer to compile."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.uintp, *_ROW_CALL.args), generate


@helper
def kept_row(x, start, size, filters, out, tokens, to, part, scratch):
    """Write the distribution of x[start : start + size] without its zeros; return (is sound, count).

    The `count` probabilities and token ids, in ascending order of ids, are written to `out` and `tokens` from
    place `to` on. If `count` is ALL, all probabilities are written, as by `distribution_row`: without top-p few of
    them are zero.

    part: scratch float32 [CHUNK]. Other arguments: see `distribution_row`.
    """
    factor, top_k, top_p, min_p = filters
    lanes, buckets, selected = scratch
    if top_p >= np.float32(1.0):
        return distribution_row(x, start, size, filters, out, to, scratch), ALL
    top, floor = _top_and_floor(x, start, size, top_k, scratch)
    # An exponential is at least its token's probability, because the sum has one exponential that is 1.
    bar, total, count = max(_LIKELY, _lowest_threshold(size, top_p)), 0.0, np.uintp(0)
    for first in range(0, size, CHUNK):
        few = min(CHUNK, size - first)
        total += _exponentials(x, start + first, few, top, factor, floor, part, 0, lanes)
        count = _collect(part, few, bar, first, out, tokens, to, count)
    share, likely, mass, base = np.float32(1.0 / total), np.uintp(0), 0.0, np.uintp(to)
    for i in range(count):
        out[base + i] *= share
        selected[likely] = out[base + i]
        likely += np.uintp(out[base + i] >= bar)
    for i in range(likely):
        mass += np.float64(selected[i])
    if not np.float32(mass) >= top_p:
        # The distribution is flat, or not sound.
        return distribution_row(x, start, size, filters, out, to, scratch), ALL
    threshold, mass = _threshold(selected, likely, top_p, buckets)
    count = _keep(out, tokens, base, count, threshold, np.float32(mass))
    if min_p > np.float32(0.0):
        threshold, mass = min_p * (share / np.float32(mass)), 0.0
        for i in range(count):
            mass += np.float64(out[base + i]) if out[base + i] >= threshold else 0.0
        count = _keep(out, tokens, base, count, threshold, np.float32(mass))
    return True, np.int64(count)


@helper
def _collect(part, size, bar, first, out, tokens, to, count):
    """Append the numbers of part[:size] from `bar` up to `out`, and their places plus `first` to `tokens`.

    Place `to` of `out` and `tokens` is the first of `count` places that are in use. Return the new count.
    """
    num_lanes, end = np.uintp(LANES), np.uintp(to) + count
    for block in range(np.uintp(0), np.uintp(size), num_lanes):
        few, any_above = min(num_lanes, np.uintp(size) - block), False
        for j in range(few):
            any_above |= part[block + j] >= bar
        if any_above:
            for j in range(few):
                if part[block + j] >= bar:
                    out[end], tokens[end] = part[block + j], np.int64(first) + np.int64(block + j)
                    end += np.uintp(1)
    return end - np.uintp(to)


@helper
def _keep(out, tokens, base, count, bar, total):
    """Of `count` numbers from `base` on, keep those of at least `bar`, divided by `total`; return how many."""
    kept = base
    for i in range(base, base + count):
        if out[i] >= bar:
            out[kept], tokens[kept] = out[i] / total, tokens[i]
            kept += np.uintp(1)
    return kept - base


@kernel
def distributions(state, threads, x, size, filters, out):
    """Write the distribution of each row of `size` logits to `out`; x, out float32 [rows * size]."""
    rows, scratch = len(x) // size, scratch_for(size)
    row = claim(state, 0)
    while row < rows:
        distribution_row(x, row * size, size, filters, out, row * size, scratch)
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)


@helper
def first_largest(x, start, size, lanes):
    """Return the first index of the largest of x[start : start + size], ignoring NaN; 0 if all are NaN."""
    top, num_lanes = _largest(x, start, size, lanes), np.uintp(LANES)
    for first in range(np.uintp(0), np.uintp(size), num_lanes):
        at, few, is_here = np.uintp(start) + first, min(num_lanes, np.uintp(size) - first), False
        for j in range(few):
            is_here |= x[at + j] == top
        if is_here:
            place = np.int64(first)
            while x[start + place] != top:
                place += 1
            return place
    return 0


@helper
def largest_of_row(x, start, size, lanes):
    """Return the first index of the largest of x[start : start + size], and the number; NaN counts as the largest.

    The row is read once, because a chunk stays in the first-level cache while we look for NaN and for its maximum.
    """
    top, chunk = np.float32(-np.inf), 0
    for first in range(0, size, CHUNK):
        few, at, unsound = min(CHUNK, size - first), np.uintp(start + first), False
        for i in range(np.uintp(few)):
            unsound |= x[at + i] != x[at + i]
        if unsound:
            place = start + first
            while x[place] == x[place]:
                place += 1
            return place - start, x[place]
        chunk_top = _largest(x, start + first, few, lanes)
        if chunk_top > top:
            top, chunk = chunk_top, first
    return chunk + first_largest(x, start + chunk, min(CHUNK, size - chunk), lanes), top


@kernel
def largest(state, threads, x, size, places, values):
    """Find each row's largest number: write its first index to `places`, and the number to `values`.

    NaN counts as the largest. x float32 [rows * size]; places int64 [rows]; values float32 [rows].
    """
    rows, lanes = len(places), np.empty(LANES, np.float32)
    row = claim(state, 0)
    while row < rows:
        places[row], values[row] = largest_of_row(x, row * size, size, lanes)
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)


@kernel
def scatter_columns(state, threads, q, width, ids, out, size):
    """Spread each row of q over `size` columns: column i becomes column ids[i], and the others are 0.

    q float32 [rows * width]; ids int64 [width]; out float32 [rows * size].
    """
    rows, few = len(q) // max(width, 1), np.uintp(width)
    row = claim(state, 0)
    while row < rows:
        at, to = np.uintp(row * width), np.uintp(row * size)
        for i in range(np.uintp(size)):
            out[to + i] = np.float32(0.0)
        for i in range(few):
            out[to + np.uintp(ids[i])] = q[at + i]
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)


@kernel
def scatter_rows(state, threads, x, size, at, out):
    """Write row at[r] of x to row r of out, or zeros if at[r] is -1.

    at int64 [rows]; out float32 [rows * size].
    """
    rows = len(at)
    row = claim(state, 0)
    while row < rows:
        to, source = np.uintp(row * size), np.uintp(max(at[row], 0) * size)
        if at[row] < 0:
            for i in range(np.uintp(size)):
                out[to + i] = np.float32(0.0)
        else:
            for i in range(np.uintp(size)):
                out[to + i] = x[source + i]
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)


@kernel
def keep_allowed(state, threads, x, size, starts, bits, words):
    """Set the numbers of rows whose token has no bit to -inf, in place.

    x float32, with row r at x[starts[r] : starts[r] + size]; bits int32 [rows * words]: token t of a row is bit
    t % 32 of its word t // 32. Tokens after the last word have no bit.
    """
    rows, last = len(starts), (size + 31) // 32
    row = claim(state, 0)
    while row < rows:
        for word in range(last):
            allowed = bits[row * words + word] if word < words else np.int32(0)
            at, few = np.uintp(starts[row] + 32 * word), np.uintp(min(32, size - 32 * word))
            if allowed == 0:
                for i in range(few):
                    x[at + i] = np.float32(-np.inf)
            elif allowed != -1:
                # A choice instead of a branch, which LLVM turns into vector instructions.
                for i in range(few):
                    keep = (allowed >> np.int32(i)) & np.int32(1)
                    x[at + i] = x[at + i] if keep else np.float32(-np.inf)
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)
