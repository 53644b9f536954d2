"""Attention of a step's new tokens over the cached ones and one another, for one layer, in three phases.

Contract: `write` turns the projections into queries, and into keys and values in the cache; `attend` computes
what the step's plan (plan.py) asks for; `merge` writes the means of the values as vectors for the next product.
Columns are summed in segments of SEGMENT from position 0, and the segments' softmaxes merged in that order
(Milakov and Gimelshein, arXiv 1805.02867). So a token's result depends on its own row alone: not on what the row
shares, on other rows, on how many tokens the step has, on items or on threads. Stale columns of a cache never
matter: no query sees a score behind its own position, and of the values only the odd partner of the last column
written is read beside it, which is zeroed then. NaN stays visible; among a step's values it may reach earlier
tokens of the same row in the same step. Reference: kernels/reference/attention.py.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper
from ..calls.threads import claim, done, wait
from ..elements import exp2, norm, pack, put, put_short, rotate, rounded
from ..kinds import STEP
from .layout import SEGMENT, SINKS, TILE
from .outer import QUERIES, ROOM, call_segment
from .plan import DIRECT, MOST, SHARED

_TILES = SEGMENT // TILE
_LOG2_E = np.float32(1.4426950408889634)


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
    while True:
        chunk = claim(state, phase)
        if chunk >= blocks * kv_heads:
            break
        head = chunk % kv_heads
        for token in range(chunk // kv_heads * each, min((chunk // kv_heads + 1) * each, tokens)):
            row = plan[1][token, 0]
            column = lengths[row] + token - firsts[row]
            for query in range(group):
                at = token * rows + (head * group + query) * dim
                if len(norms):
                    norm(y, at, dim, norms, 2 * layer * dim, eps, y, at)
                rotate(y, at, dim // 2, turns, column * dim, scale)
                to = ((head * tokens + plan[1][token, 1]) * group + query) * size
                if dot:
                    for i in range(np.uintp(dim)):
                        short[np.uintp(to) + i] = rounded(y[np.uintp(at) + i])
                else:
                    for i in range(np.uintp(dim)):
                        wide[np.uintp(to) + i] = y[np.uintp(at) + i]
            at = token * rows + (heads + head) * dim
            if len(norms):
                norm(y, at, dim, norms, (2 * layer + 1) * dim, eps, y, at)
            rotate(y, at, dim // 2, turns, column * dim, one)
            keys, values = _places(caches, 0, layer, row, head, kv_heads, size, dot)
            column -= sight[0][row]
            last = token == firsts[row + 1] - 1
            _write(y, at, at + kv_heads * dim, dim, size, column, keys, values, last, dot)
        done(state, phase)
    wait(state, phase, blocks * kv_heads)


@helper
def _write(y, key, value, dim, size, column, keys, values, last, dot):
    """Write y[key : key + dim] and y[value : value + dim] into a row's tiles."""
    tile = column // TILE * TILE * size * (2 if dot else 4)
    inside = column % TILE
    to = np.uintp(keys + tile + 4 * inside)
    if dot:
        for i in range(np.uintp(dim // 2)):
            at = np.uintp(key) + np.uintp(2) * i
            put_short(to + np.uintp(4 * TILE) * i, rounded(y[at]))
            put_short(to + np.uintp(4 * TILE) * i + np.uintp(2), rounded(y[at + np.uintp(1)]))
        to = np.uintp(values + tile + inside // 2 * 4 * size + inside % 2 * 2)
        for i in range(np.uintp(dim)):
            put_short(to + np.uintp(4) * i, rounded(y[np.uintp(value) + i]))
        if last and inside % 2 == 0:
            for i in range(np.uintp(dim)):
                put_short(to + np.uintp(4) * i + np.uintp(2), np.uint16(0))
    else:
        for i in range(np.uintp(dim)):
            put(to + np.uintp(4 * TILE) * i, y[np.uintp(key) + i])
        to = np.uintp(values + tile + inside * 4 * size)
        for i in range(np.uintp(dim)):
            put(to + np.uintp(4) * i, y[np.uintp(value) + i])


@helper
def _places(caches, which, layer, row, head, kv_heads, size, dot):
    """Addresses of a head's keys and values in the row's own cache (which = 0) or in that of the prefixes (1)."""
    rows, each = caches[3 * which + 1], caches[3 * which + 2] * TILE * size * (2 if dot else 4)
    keys = caches[3 * which] + ((2 * layer * rows + row) * kv_heads + head) * each
    return keys, keys + rows * kv_heads * each


@helper
def attend(state, phase, layer, shape, step, sight, plan, caches, address, short, wide, dot, parts, marks, out):
    """The items of a plan: DIRECT ones into `out` [N, heads x dim], others' segments into `parts` and `marks`.

    step: firsts [B + 1] and lengths [B]: the new tokens of row b are those from firsts[b] on, behind lengths[b]
    cached ones. sight: starts [B], how many columns of a row are those of its prefix; groups [B], of which; skip
    [B], columns SINKS to skip - 1 are not seen. plan: items, tokens, order (plan.py). caches: address, rows and
    tiles of a row, of the rows' own cache and of that of the prefixes. address: of the compiled `segment`.
    short, wide: the queries. parts [kept segments, heads, padded]: sums of values; marks [kept segments, heads,
    2]: largest scores and sums of weights.
    """
    heads, kv_heads, dim, size = shape
    items, tokens, order = plan
    group, width = heads // kv_heads, 2 if dot else 4
    chunks = len(items) * kv_heads
    tiles, seen = np.empty((2, _TILES), np.int64), np.empty(QUERIES, np.int64)
    room, sums = np.empty(ROOM + 64, np.uint8), np.empty(QUERIES * size, np.float32)
    stats = np.empty(2 * QUERIES, np.float32)
    totals, notes = np.empty(max(MOST, group) * size, np.float32), np.empty(2 * max(MOST, group), np.float32)
    while True:
        chunk = claim(state, phase)
        if chunk >= chunks:
            break
        item, head = items[chunk // kv_heads], chunk % kv_heads
        row, start, what = item[0], item[1], item[5]
        base = tokens[step[0][row], 1]
        queries = (item[2] - start) * group
        # Numba frees an array after its last use, and knows nothing of addresses: so here, not before the loop.
        room_at = (room.ctypes.data + np.uintp(63)) & ~np.uintp(63)
        for segment in range(item[3], item[4]):
            columns, low, high = _gather(segment, layer, row, head, shape, step, sight, caches, dot, tiles)
            for first in range(0, queries, QUERIES):
                number, most = min(QUERIES, queries - first), 0
                for i in range(number):
                    seen[i] = SEGMENT
                    if what != SHARED:
                        position = step[1][row] + start + (first + i) // group - base
                        last = position + 1 - segment * SEGMENT
                        seen[i] = max(0, min(columns, min(last, low) + max(0, last - high)))
                    most = max(most, seen[i])
                if most == 0:
                    continue
                at = ((head * len(order) + start) * group + first) * size * width
                at += np.int64(short.ctypes.data if dot else wide.ctypes.data)
                call_segment(
                    np.uintp(address), number, np.uintp(at), size * width, dim * width // 4, tiles.ctypes.data,
                    tiles.ctypes.data + np.uintp(8 * _TILES), (most + TILE - 1) // TILE, most, seen.ctypes.data,
                    room_at, sums.ctypes.data, 4 * size, stats.ctypes.data,
                )  # fmt: skip
                for i in range(number):
                    if what == DIRECT:
                        _fold(totals, notes, first + i, sums, stats, i, size, segment == 0)
                    elif seen[i]:
                        token = order[start + (first + i) // group]
                        to = (tokens[token, 2] + segment) * heads + head * group + (first + i) % group
                        _fold(parts, marks, to, sums, stats, i, size, True)
        if what == DIRECT:
            for query in range(queries):
                to = (order[start + query // group] * heads + head * group + query % group) * dim
                _finish(totals, notes, query, size, out, to, dim)
        done(state, phase)
    wait(state, phase, chunks)


@helper
def _gather(segment, layer, row, head, shape, step, sight, caches, dot, tiles):
    """The addresses of the tiles of a segment that a row sees; how many columns they have; which lie between.

    Columns `low` to `high` - 1 of the segment are not seen, and have no tiles.
    """
    _, kv_heads, _, size = shape
    starts, groups, skip = sight
    first, start = segment * SEGMENT, starts[row]
    end = min(SEGMENT, step[1][row] + step[0][row + 1] - step[0][row] - first)
    low, high = min(max(SINKS - first, 0), SEGMENT), min(max(skip[row] - first, 0), SEGMENT)
    low, high = (low, high) if low < high else (SEGMENT, SEGMENT)
    each = TILE * size * (2 if dot else 4)
    keys, values = _places(caches, 0, layer, row, head, kv_heads, size, dot)
    shared_keys, shared_values = keys, values
    if start:
        shared_keys, shared_values = _places(caches, 1, layer, groups[row], head, kv_heads, size, dot)
    found = 0
    for column in range(0, end, TILE):
        if low <= column < high:
            continue
        if first + column < start:
            place = (first + column) // TILE * each
            tiles[0, found], tiles[1, found] = shared_keys + place, shared_values + place
        else:
            place = (first + column - start) // TILE * each
            tiles[0, found], tiles[1, found] = keys + place, values + place
        found += 1
    for i in range(max(found, 1), _TILES):
        tiles[0, i], tiles[1, i] = tiles[0, i - 1], tiles[1, i - 1]
    return found * TILE, low, high


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
def merge(state, phase, shape, step, sight, plan, parts, marks, x, blocks, short, wide, dot):
    """The kept segments of each token merged into x [N, heads x dim], and x as vectors (elements.py)."""
    heads, _, dim, size = shape
    firsts, lengths, skip = step[0], step[1], sight[2]
    inputs, tokens = heads * dim, plan[1]
    steps, single = (inputs + STEP - 1) // STEP, len(parts) > 0
    chunks = len(tokens) if single else len(blocks) - 1
    totals, notes = np.empty(size, np.float32), np.empty(2, np.float32)
    while True:
        chunk = claim(state, phase)
        if chunk >= chunks:
            break
        block = chunk
        if single:
            block = 0
            while blocks[block + 1] <= chunk:
                block += 1
        start, width = blocks[block], blocks[block + 1] - blocks[block]
        for token in range(chunk if single else start, chunk + 1 if single else start + width):
            row, kept = tokens[token, 0], tokens[token, 2]
            last = (lengths[row] + token - firsts[row]) // SEGMENT
            for head in range(heads if kept >= 0 else 0):
                _fold(totals, notes, 0, parts, marks, kept * heads + head, size, True)
                for segment in range(1, last + 1):
                    if (segment + 1) * SEGMENT > skip[row]:
                        _fold(totals, notes, 0, parts, marks, (kept + segment) * heads + head, size, False)
                _finish(totals, notes, 0, size, x, token * inputs + head * dim, dim)
            pack(x, token * inputs, inputs, short, wide, dot, (start * steps + token - start) * STEP, width)
        done(state, phase)
    wait(state, phase, chunks)
