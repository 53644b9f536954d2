"""Attention of a step's new tokens over the cached ones and one another, for one layer, in three phases.

Contract: `write` turns the projections into queries, and into keys and values in the cache; `attend` computes
what the step's plan (plan.py) asks for; `merge` writes the means of the values as vectors for the next product.
Columns are summed in segments of SEGMENT from position 0, and the segments' softmaxes merged in that order
(Milakov and Gimelshein, arXiv 1805.02867). So a token's result depends on its own row alone: not on what the row
shares, on other rows, on how many tokens the step has, on items or on threads. Stale columns of a cache never
matter: no query sees a score after its own position, and values after the last column written are read only
within its tile, where `write` zeroes them. NaN stays visible; in float32 it may reach earlier tokens of the same
row in the same step. Reference: kernels/reference/attention.py.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from ..elements import copy, exp2, norm, pack, place, put, put_short, rotate, rounded
from ..kinds import STEP
from .gather import TILES, gather, lay_path, places
from .layout import SEGMENT, TILE
from .outer import QUERIES, ROOM, call_segment
from .paths import TAIL, zero_after
from .plan import DIRECT, MOST, SHARED

_LOG2_E = np.float32(1.4426950408889634)
# The exponent's bits of a bfloat16 number: all are set in NaN and infinity.
_EXPONENT = np.uint16(0x7F80)


@helper
def write(state, phase, layer, y, rows, shape, step, sight, plan, caches, turns, norms, eps, short, wide, dot):
    """Rotated and scaled queries [key-value heads, N, group, padded] in `short` or `wide`; keys and values cached.

    y [N, rows]: the projections. shape: heads, key-value heads, dim, padded dim. Others: see `attend`.
    """
    heads, kv_heads, dim, size = shape
    firsts, lengths, group = step[0], step[1], heads // kv_heads
    tokens = firsts[-1]
    each = max(1, tokens // 16)
    blocks = (tokens + each - 1) // each
    scale, one = _LOG2_E / np.sqrt(np.float32(dim)), np.float32(1.0)
    words = np.empty(dim, np.float32)
    while True:
        chunk = claim(state, phase)
        if chunk >= blocks * kv_heads:
            break
        head = chunk % kv_heads
        for token in range(chunk // kv_heads * each, min((chunk // kv_heads + 1) * each, tokens)):
            row, position = plan[1][token, 0], plan[1][token, 3]
            for query in range(group):
                at = token * rows + (head * group + query) * dim
                if len(norms):
                    norm(y, at, dim, norms, 2 * layer * dim, eps, y, at)
                rotate(y, at, dim // 2, turns, position * dim, scale)
                to = ((head * tokens + plan[1][token, 1]) * group + query) * size
                if dot:
                    _round(y, at, dim, short, to)
                else:
                    copy(y, at, wide, to, dim)
            at = token * rows + (heads + head) * dim
            if len(norms):
                norm(y, at, dim, norms, (2 * layer + 1) * dim, eps, y, at)
            rotate(y, at, dim // 2, turns, position * dim, one)
            keys, values = places(caches, 0, layer, row, head, kv_heads, size, dot)
            column = lengths[row] + token - firsts[row] - sight[0][row]
            last = token == firsts[row + 1] - 1
            _write(y, at, at + kv_heads * dim, dim, size, column, keys, values, last, dot, words)
        done(state, phase)
    wait(state, phase, blocks * kv_heads)


@helper
def _round(x, start, size, short, to):
    """short[to : to + size] = x[start : start + size] in bfloat16."""
    at, place = np.uintp(start), np.uintp(to)
    for i in range(np.uintp(size)):
        short[place + i] = rounded(x[at + i])


@helper
def _write(y, key, value, dim, size, column, keys, values, last, dot, words):
    """Write y[key : key + dim] and y[value : value + dim] into a row's tiles; words float32 [dim]: scratch.

    Two neighbouring columns share each word of the values, and another thread may be writing the other one, so
    store only this column's half.
    """
    tile = column // TILE * TILE * size * (2 if dot else 4)
    inside, halves = column % TILE, words.view(np.uint16)
    to = np.uintp(keys + tile + 4 * inside)
    if dot:
        _round(y, value, dim, halves, 0)
        unsound, at = False, np.uintp(values + tile + inside // 2 * 4 * size + inside % 2 * 2)
        for i in range(np.uintp(dim)):
            unsound |= (halves[i] & _EXPONENT) == _EXPONENT
        # Columns that a query does not see have weight zero, which would turn NaN. So an unsound value becomes
        # zero, and its key NaN, whose score only the queries that see it have.
        for i in range(np.uintp(dim)):
            put_short(at + np.uintp(4) * i, np.uint16(0) if unsound else halves[i])
        _round(y, key, dim, halves, 0)
        for i in range(np.uintp(dim // 2)):
            put(to + np.uintp(4 * TILE) * i, np.float32(np.nan) if unsound else words[i])
        if last:
            zero_after(values + tile, inside, dim, size)
    else:
        for i in range(np.uintp(dim)):
            put(to + np.uintp(4 * TILE) * i, y[np.uintp(key) + i])
        to = np.uintp(values + tile + inside * 4 * size)
        for i in range(np.uintp(dim)):
            put(to + np.uintp(4) * i, y[np.uintp(value) + i])


@helper
def attend(state, phase, layer, shape, step, sight, plan, caches, segment_of, short, wide, dot, parts, marks, out):
    """The items of a plan: DIRECT ones into `out` [N, heads x dim], others' segments into `parts` and `marks`.

    step: firsts [B + 1] and lengths [B]: the new tokens of row b are those from firsts[b] on, after lengths[b]
    cached ones. sight: starts [B], how many columns of a row are those of its prefix; groups [B], of which; skip
    [B], columns SINKS to skip - 1 are not seen. plan: items, tokens, order (plan.py), the trees' bases and sees
    (step.py). caches: address, rows and tiles of a row, of the rows' own cache and of that of the prefixes.
    segment_of: the compiled `segment` (compiled.py).
    short, wide: the queries. parts [kept segments, heads, padded]: sums of values; marks [kept segments, heads,
    2]: largest scores and sums of weights.
    """
    heads, kv_heads, dim, size = shape
    items, tokens, order, _, sees = plan
    group, width = heads // kv_heads, 2 if dot else 4
    chunks = len(items) * kv_heads
    tiles, seen = np.empty((2, TILES), np.int64), np.empty(QUERIES, np.int64)
    room, sums = np.empty(ROOM + 64, np.uint8), np.empty(QUERIES * size, np.float32)
    stats = np.empty(2 * QUERIES, np.float32)
    totals, notes = np.empty(max(MOST, group) * size, np.float32), np.empty(2 * max(MOST, group), np.float32)
    tail = np.empty(2 * TAIL * TILE * size * width + 64 if len(sees) else 0, np.uint8)
    while True:
        chunk = claim(state, phase)
        if chunk >= chunks:
            break
        item, head = items[chunk // kv_heads], chunk % kv_heads
        row, start, what = item[0], item[1], item[5]
        queries = (item[2] - start) * group
        position, leaf = tokens[order[start], 3], tokens[order[start], 4]
        if what == SHARED:
            position = leaf = -1
        # Numba frees an array after its last use, and knows nothing of addresses: so here, not before the loop.
        room_at = (room.ctypes.data + np.uintp(63)) & ~np.uintp(63)
        tail_at = np.int64((tail.ctypes.data + np.uintp(63)) & ~np.uintp(63))
        if leaf >= 0:
            lay_path(leaf, layer, row, head, shape, sight, plan, caches, dot, tail_at)
        for segment in range(item[3], item[4]):
            columns, low, high = gather(
                segment, layer, row, head, shape, step, sight, plan, caches, dot, leaf, tail_at, tiles
            )
            for first in range(0, queries, segment_of.queries):
                number = min(segment_of.queries, queries - first)
                most = _sees(seen[:number], position, first, group, segment, columns, low, high)
                if most == 0:
                    continue
                at = ((head * len(order) + start) * group + first) * size * width
                at += np.int64(short.ctypes.data if dot else wide.ctypes.data)
                call_segment(
                    np.uintp(segment_of.address), number, np.uintp(at), size * width, dim * width // 4,
                    tiles.ctypes.data, tiles.ctypes.data + np.uintp(8 * TILES), (most + TILE - 1) // TILE, most,
                    seen.ctypes.data, room_at, sums.ctypes.data, 4 * size, stats.ctypes.data,
                )  # fmt: skip
                token, query = start + first // group, first % group
                for i in range(number):
                    if what == DIRECT and item[4] == 1:
                        to = (order[token] * heads + head * group + query) * dim
                        _finish(sums, stats, i, size, out, to, dim)
                    elif what == DIRECT:
                        _fold(totals, notes, first + i, sums, stats, i, size, segment == 0)
                    elif seen[i]:
                        to = (tokens[order[token], 2] + segment) * heads + head * group + query
                        _fold(parts, marks, to, sums, stats, i, size, True)
                    query += 1
                    if query == group:
                        token, query = token + 1, 0
        if what == DIRECT and item[4] > 1:
            for query in range(queries):
                to = (order[start + query // group] * heads + head * group + query % group) * dim
                _finish(totals, notes, query, size, out, to, dim)
        done(state, phase)
    wait(state, phase, chunks)


@helper
def _sees(seen, position, first, group, segment, columns, low, high):
    """seen[i]: how many of a segment's `columns` the query first + i sees; returns the most.

    position: of the token of query 0; -1: all columns are seen. Columns low to high - 1 have no tiles (`gather`).
    """
    most, before = 0, segment * SEGMENT
    last, query = position + first // group + 1 - before, first % group
    for i in range(len(seen)):
        seen[i] = columns if position < 0 else max(0, min(columns, min(last, low) + max(0, last - high)))
        most = max(most, seen[i])
        query += 1
        if query == group:
            last, query = last + 1, 0
    return most


@helper
def _fold(totals, notes, to, sums, stats, source, size, first):
    """Merge a query's sums over one more segment into its totals; the first one is copied."""
    at, start = np.uintp(to * size), np.uintp(source * size)
    if first:
        for i in range(np.uintp(size)):
            totals[at + i] = sums[start + i]
        notes[2 * to], notes[2 * to + 1] = stats[2 * source], stats[2 * source + 1]
        return
    before, largest = notes[2 * to], stats[2 * source]
    now = max(before, largest)
    shrink, factor = exp2(before - now), exp2(largest - now)
    notes[2 * to], notes[2 * to + 1] = now, notes[2 * to + 1] * shrink + stats[2 * source + 1] * factor
    for i in range(np.uintp(size)):
        totals[at + i] = totals[at + i] * shrink + sums[start + i] * factor


@helper
def _finish(totals, notes, source, size, out, to, dim):
    """out[to : to + dim]: a query's mean of the values."""
    at, start, factor = np.uintp(to), np.uintp(source * size), np.float32(1.0) / notes[2 * source + 1]
    for i in range(np.uintp(dim)):
        out[at + i] = totals[start + i] * factor


@helper
def merge(state, phase, shape, step, sight, plan, parts, marks, x, blocks, short, wide, form):
    """The kept segments of each token merged into x [N, heads x dim], and x as vectors (elements.py)."""
    heads, _, dim, size = shape
    skip, inputs, tokens = sight[2], heads * dim, plan[1]
    steps = (inputs + STEP - 1) // STEP
    totals, notes = np.empty(size, np.float32), np.empty(2, np.float32)
    while True:
        token = claim(state, phase)
        if token >= len(tokens):
            break
        row, kept = tokens[token, 0], tokens[token, 2]
        last = tokens[token, 3] // SEGMENT
        for head in range(heads if kept >= 0 else 0):
            _fold(totals, notes, 0, parts, marks, kept * heads + head, size, True)
            for segment in range(1, last + 1):
                if (segment + 1) * SEGMENT > skip[row]:
                    _fold(totals, notes, 0, parts, marks, (kept + segment) * heads + head, size, False)
            _finish(totals, notes, 0, size, x, token * inputs + head * dim, dim)
        to, width = place(token, blocks, steps)
        pack(x, token * inputs, inputs, short, wide, form, to, width)
        done(state, phase)
    wait(state, phase, len(tokens))


@kernel
def alone(
    state, _, layers, y, step, shape, sight, plan, caches, segment, queries, parts, dot, turns, norms, out, short,
    wide,
):  # fmt: skip
    """The three phases of each layer, all from y; see `attend_alone` (step.py)."""
    heads, kv_heads, dim, _ = shape
    rows, eps = (heads + 2 * kv_heads) * dim, np.float32(0.0)
    for layer in range(layers):
        p = 3 * layer
        write(state, p, layer, y, rows, shape, step, sight, plan, caches, turns, norms, eps, *queries, dot)
        attend(state, p + 1, layer, shape, step, sight, plan, caches, segment, *queries, dot, *parts, out)
        merge(state, p + 2, shape, step, sight, plan, *parts, out, step[2], short, wide, 0)
