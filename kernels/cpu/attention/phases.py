"""Attention of a step's new tokens over the cached ones and one another, for one layer, in three phases.

`write` turns the projections into queries, and into keys and values in the cache. `attend` computes the items of
the step's plan (plan.py). `merge` writes the means of the values as vectors for the next product. Columns are
summed in segments of SEGMENT from position 0, and the segments' softmaxes are merged in that order (Milakov and
Gimelshein, arXiv 1805.02867). The reference is kernels/reference/attention.py.

Invariants:

- A token's result depends only on its own row: not on what the row shares, on other rows, on the number of tokens
  in the step, on items or on threads.
- Stale columns of a cache never matter. No query sees a score after its own position, and values after the last
  written column are read only within its tile, where `write` zeroes them.
- NaN stays visible. In float32, a token's NaN may also reach earlier tokens of the same row in the same step.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from ..elements import copy, exp2, norm, pack, rotate, rounded, store_float, store_u16, vector_position
from ..kinds import STEP
from .gather import TILES, gather, head_addresses, lay_out_path
from .layout import SEGMENT, TILE
from .outer import QUERIES, ROOM, call_segment
from .paths import TAIL, zero_after
from .plan import DIRECT, MAX_DIRECT_QUERIES, SHARED

_LOG2_E = np.float32(1.4426950408889634)
# The exponent bits of a bfloat16 number; all are set in NaN and infinity.
_EXPONENT = np.uint16(0x7F80)


@helper
def write(
    state, phase, layer, y, rows, shape, step, visible, plan, caches, rope, rotated, norms, norm_size, eps, factor,
    queries_u16, queries_f32, dot,
):  # fmt: skip
    """Write rotated, scaled queries to the query buffers, and keys and values to the cache.

    Queries are [key-value heads, N, group, padded]. y [N, rows]: the projections. shape: heads, key-value heads,
    dim, padded dim. rotated: numbers of a head that this layer rotates. norms [layers, norm_size], flat: see
    `_norm_heads`. factor: of the scores, besides 1 / sqrt(dim). Other arguments: see `attend`.
    """
    heads, kv_heads, dim, size = shape
    firsts, lengths, group = step[0], step[1], heads // kv_heads
    tokens = firsts[-1]
    block_tokens = max(1, tokens // 16)
    blocks = (tokens + block_tokens - 1) // block_tokens
    # A norm over the whole width needs all heads of a token in one chunk.
    chunk_heads = kv_heads if norm_size > 2 * dim else 1
    parts = kv_heads // chunk_heads
    scale, unit = _LOG2_E / np.sqrt(np.float32(dim)) * factor, np.float32(1.0)
    words = np.empty(dim, np.float32)
    while True:
        chunk = claim(state, phase)
        if chunk >= blocks * parts:
            break
        first_head = chunk % parts * chunk_heads
        for token in range(chunk // parts * block_tokens, min((chunk // parts + 1) * block_tokens, tokens)):
            row, position = plan[1][token, 0], plan[1][token, 3]
            if norm_size:
                _norm_heads(y, token * rows, first_head, shape, norms, layer * norm_size, norm_size, eps)
            for head in range(first_head, first_head + chunk_heads):
                for query in range(group):
                    at = token * rows + (head * group + query) * dim
                    rotate(y, at, rotated, dim, rope, position * rotated, scale)
                    to = ((head * tokens + plan[1][token, 1]) * group + query) * size
                    if dot:
                        _write_bfloat16(y, at, dim, queries_u16, to)
                    else:
                        copy(y, at, queries_f32, to, dim)
                at = token * rows + (heads + head) * dim
                rotate(y, at, rotated, dim, rope, position * rotated, unit)
                keys, values = head_addresses(caches, 0, layer, row, head, kv_heads, size, dot)
                column = lengths[row] + token - firsts[row] - visible[0][row]
                last = token == firsts[row + 1] - 1
                _write_column(y, at, at + kv_heads * dim, dim, size, column, keys, values, last, dot, words)
        done(state, phase)
    wait(state, phase, blocks * parts)


@helper
def _norm_heads(y, start, head, shape, norms, first, norm_size, eps):
    """Normalise a token's queries and keys: those of one key-value head, or all of them over their whole width.

    From norms[first] on there are the weights of a head's queries and keys, norm_size = 2 dim, or of all queries
    and keys.
    """
    heads, kv_heads, dim, _ = shape
    whole, group = norm_size > 2 * dim, heads // kv_heads
    queries, size, key_size = (1, heads * dim, kv_heads * dim) if whole else (group, dim, dim)
    for part in range(queries + 1):
        is_key = part == queries
        at = start + (heads + head if is_key else head * group + part) * dim
        norm(y, at, key_size if is_key else size, norms, first + size if is_key else first, eps, y, at)


@helper
def _write_bfloat16(x, start, size, vectors_u16, to):
    """Write x[start : start + size] in bfloat16 to vectors_u16[to : to + size]."""
    at, place = np.uintp(start), np.uintp(to)
    for i in range(np.uintp(size)):
        vectors_u16[place + i] = rounded(x[at + i])


@helper
def _write_column(y, key, value, dim, size, column, keys, values, last, dot, words):
    """Write y[key : key + dim] and y[value : value + dim] into a row's tiles; words float32 [dim]: scratch.

    Two neighbouring columns share each word of the values, and another thread may be writing the other column, so
    store only this column's half.
    """
    tile = column // TILE * TILE * size * (2 if dot else 4)
    inside, halves = column % TILE, words.view(np.uint16)
    to = np.uintp(keys + tile + 4 * inside)
    if dot:
        _write_bfloat16(y, value, dim, halves, 0)
        unsound, at = False, np.uintp(values + tile + inside // 2 * 4 * size + inside % 2 * 2)
        for i in range(np.uintp(dim)):
            unsound |= (halves[i] & _EXPONENT) == _EXPONENT
        # Columns that a query does not see have zero weight, but NaN or infinity times zero is NaN. So an unsound
        # value becomes zero and its key becomes NaN: then only queries that see this column get NaN.
        for i in range(np.uintp(dim)):
            store_u16(at + np.uintp(4) * i, np.uint16(0) if unsound else halves[i])
        _write_bfloat16(y, key, dim, halves, 0)
        for i in range(np.uintp(dim // 2)):
            store_float(to + np.uintp(4 * TILE) * i, np.float32(np.nan) if unsound else words[i])
        if last:
            zero_after(values + tile, inside, dim, size)
    else:
        for i in range(np.uintp(dim)):
            store_float(to + np.uintp(4 * TILE) * i, y[np.uintp(key) + i])
        to = np.uintp(values + tile + inside * 4 * size)
        for i in range(np.uintp(dim)):
            store_float(to + np.uintp(4) * i, y[np.uintp(value) + i])


@helper
def attend(
    state, phase, layer, shape, step, visible, plan, caches, segment_of, queries_u16, queries_f32, dot, parts,
    part_stats, out,
):  # fmt: skip
    """Compute the items of a plan: DIRECT ones into `out`, segments of others into `parts` and `part_stats`.

    Args:
        step: firsts [B + 1] and lengths [B]; the new tokens of row b begin at firsts[b] and follow lengths[b]
            cached ones.
        visible: starts [B], the columns of each row that are in its prefix; groups [B], its prefix; gap_ends [B],
            columns SINKS to gap_ends - 1 are hidden.
        plan: items, tokens and order (plan.py), bases and sees of the trees (tree.py).
        caches: address, rows, and tiles per row, of the rows' cache and then of the prefixes' cache.
        segment_of: the compiled `segment` (compiled.py).
        queries_u16, queries_f32: the queries.
        parts: [kept segments, heads, padded], sums of values.
        part_stats: [kept segments, heads, 2], largest scores and sums of weights.
        out: [N, heads x dim].
    """
    heads, kv_heads, dim, size = shape
    items, tokens, order, _, sees = plan
    group, width = heads // kv_heads, 2 if dot else 4
    chunks = len(items) * kv_heads
    tiles, seen = np.empty((2, TILES), np.int64), np.empty(QUERIES, np.int64)
    scratch, sums = np.empty(ROOM + 64, np.uint8), np.empty(QUERIES * size, np.float32)
    stats = np.empty(2 * QUERIES, np.float32)
    totals, total_stats = (
        np.empty(max(MAX_DIRECT_QUERIES, group) * size, np.float32),
        np.empty(2 * max(MAX_DIRECT_QUERIES, group), np.float32),
    )
    tail = np.empty(2 * TAIL * TILE * size * width + 64 if len(sees) else 0, np.uint8)
    while True:
        chunk = claim(state, phase)
        if chunk >= chunks:
            break
        item, head = items[chunk // kv_heads], chunk % kv_heads
        row, start, kind = item[0], item[1], item[5]
        queries = (item[2] - start) * group
        position, leaf = tokens[order[start], 3], tokens[order[start], 4]
        if kind == SHARED:
            position = leaf = -1
        # Take the addresses here, not before the loop: numba frees an array after its last use and does not see
        # uses through addresses.
        scratch_at = (scratch.ctypes.data + np.uintp(63)) & ~np.uintp(63)
        tail_at = np.int64((tail.ctypes.data + np.uintp(63)) & ~np.uintp(63))
        if leaf >= 0:
            lay_out_path(leaf, layer, row, head, shape, visible, plan, caches, dot, tail_at)
        for segment in range(item[3], item[4]):
            columns, low, high = gather(
                segment, layer, row, head, shape, step, visible, plan, caches, dot, leaf, tail_at, tiles
            )
            for first in range(0, queries, segment_of.queries):
                number = min(segment_of.queries, queries - first)
                max_seen = _count_seen(seen[:number], position, first, group, segment, columns, low, high)
                if max_seen == 0:
                    continue
                at = ((head * len(order) + start) * group + first) * size * width
                at += np.int64(queries_u16.ctypes.data if dot else queries_f32.ctypes.data)
                call_segment(
                    np.uintp(segment_of.address), number, np.uintp(at), size * width, dim * width // 4,
                    tiles.ctypes.data, tiles.ctypes.data + np.uintp(8 * TILES), (max_seen + TILE - 1) // TILE,
                    max_seen, seen.ctypes.data, scratch_at, sums.ctypes.data, 4 * size, stats.ctypes.data,
                )  # fmt: skip
                token, query = start + first // group, first % group
                for i in range(number):
                    if kind == DIRECT and item[4] == 1:
                        to = (order[token] * heads + head * group + query) * dim
                        _write_mean(sums, stats, i, size, out, to, dim)
                    elif kind == DIRECT:
                        _merge_segment(totals, total_stats, first + i, sums, stats, i, size, segment == 0)
                    elif seen[i]:
                        to = (tokens[order[token], 2] + segment) * heads + head * group + query
                        _merge_segment(parts, part_stats, to, sums, stats, i, size, True)
                    query += 1
                    if query == group:
                        token, query = token + 1, 0
        if kind == DIRECT and item[4] > 1:
            for query in range(queries):
                to = (order[start + query // group] * heads + head * group + query % group) * dim
                _write_mean(totals, total_stats, query, size, out, to, dim)
        done(state, phase)
    wait(state, phase, chunks)


@helper
def _count_seen(seen, position, first, group, segment, columns, low, high):
    """Set seen[i] to how many of a segment's `columns` query first + i sees; return the largest.

    position: the position of query 0's token, or -1 if every query sees all columns. Columns low to high - 1 have
    no tiles (`gather`).
    """
    max_seen, before = 0, segment * SEGMENT
    last, query = position + first // group + 1 - before, first % group
    for i in range(len(seen)):
        seen[i] = columns if position < 0 else max(0, min(columns, min(last, low) + max(0, last - high)))
        max_seen = max(max_seen, seen[i])
        query += 1
        if query == group:
            last, query = last + 1, 0
    return max_seen


@helper
def _merge_segment(totals, total_stats, to, sums, stats, source, size, first):
    """Merge a query's sums over one more segment into its totals; the first segment is copied."""
    at, start = np.uintp(to * size), np.uintp(source * size)
    if first:
        for i in range(np.uintp(size)):
            totals[at + i] = sums[start + i]
        total_stats[2 * to], total_stats[2 * to + 1] = stats[2 * source], stats[2 * source + 1]
        return
    old_max, segment_max = total_stats[2 * to], stats[2 * source]
    new_max = max(old_max, segment_max)
    shrink, factor = exp2(old_max - new_max), exp2(segment_max - new_max)
    total_stats[2 * to], total_stats[2 * to + 1] = (
        new_max,
        total_stats[2 * to + 1] * shrink + stats[2 * source + 1] * factor,
    )
    for i in range(np.uintp(size)):
        totals[at + i] = totals[at + i] * shrink + sums[start + i] * factor


@helper
def _write_mean(totals, total_stats, source, size, out, to, dim):
    """Write a query's mean of the values to out[to : to + dim]."""
    at, start, factor = np.uintp(to), np.uintp(source * size), np.float32(1.0) / total_stats[2 * source + 1]
    for i in range(np.uintp(dim)):
        out[at + i] = totals[start + i] * factor


@helper
def merge(state, phase, shape, step, visible, plan, parts, part_stats, x, blocks, vectors_u16, vectors_f32, form):
    """Merge the kept segments of each token into x [N, heads x dim], and write x as vectors (elements.py)."""
    heads, _, dim, size = shape
    gap_ends, inputs, tokens = visible[2], heads * dim, plan[1]
    steps = (inputs + STEP - 1) // STEP
    totals, total_stats = np.empty(size, np.float32), np.empty(2, np.float32)
    while True:
        token = claim(state, phase)
        if token >= len(tokens):
            break
        row, first_segment = tokens[token, 0], tokens[token, 2]
        last = tokens[token, 3] // SEGMENT
        for head in range(heads if first_segment >= 0 else 0):
            _merge_segment(totals, total_stats, 0, parts, part_stats, first_segment * heads + head, size, True)
            for segment in range(1, last + 1):
                if (segment + 1) * SEGMENT > gap_ends[row]:
                    _merge_segment(
                        totals, total_stats, 0, parts, part_stats, (first_segment + segment) * heads + head, size,
                        False,
                    )  # fmt: skip
            _write_mean(totals, total_stats, 0, size, x, token * inputs + head * dim, dim)
        to, width = vector_position(token, blocks, steps)
        pack(x, token * inputs, inputs, vectors_u16, vectors_f32, form, to, width)
        done(state, phase)
    wait(state, phase, len(tokens))


@kernel
def attend_layers(
    state, _, layers, y, step, shape, visible, plan, caches, segment, queries, parts, dot, rope, norms, out,
    vectors_u16, vectors_f32,
):  # fmt: skip
    """Run the three phases for each layer, every time from the same y; see `attend_alone` (step.py)."""
    heads, kv_heads, dim, _ = shape
    rows, eps, factor = (heads + 2 * kv_heads) * dim, np.float32(0.0), np.float32(1.0)
    for layer in range(layers):
        p = 3 * layer
        write(
            state, p, layer, y, rows, shape, step, visible, plan, caches, rope, dim, norms, 0, eps, factor,
            *queries, dot,
        )  # fmt: skip
        attend(state, p + 1, layer, shape, step, visible, plan, caches, segment, *queries, dot, *parts, out)
        merge(state, p + 2, shape, step, visible, plan, *parts, out, step[2], vectors_u16, vectors_f32, 0)
