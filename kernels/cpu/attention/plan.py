"""Who computes which part of a step's attention: planned once a step, for all of its layers.

Contract: `planned` cuts the attention of a step into items, which are the chunks of a phase, one for each item and
key-value head. What a token sees is cut into segments of SEGMENT columns from position 0, whose results are merged
in ascending order (phases.py), however they are cut into items: a plan changes no bit of a result.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from .layout import SEGMENT, SINKS

# What an item computes. DIRECT: all that some tokens of a row see, to the end. APART: some segments of a row, each
# kept by itself. SHARED: the same for the rows of a prefix together.
DIRECT, APART, SHARED = 0, 1, 2
# A row of as many queries a head reads its columns often enough by itself; queries of a DIRECT item.
WIDE, MOST = 48, 96


@kernel
def planned(firsts, lengths, starts, groups, skip, group, kv_heads, threads):
    """Items, tokens, the order of the tokens, and how many segments are kept.

    firsts [B + 1], lengths, starts, groups, skip [B]: int64, see phases.py. group: query heads of a key-value
    head. items int64 [I, 6]: row, first and last + 1 token in order, first and last + 1 segment, what it
    computes. tokens int64 [N, 3]: row, place in the order, the first of its kept segments or -1. order int64
    [N]: the tokens, those of rows that are computed together side by side.
    """
    rows = len(lengths)
    order, tokens = np.empty(firsts[-1], np.int64), np.empty((firsts[-1], 3), np.int64)
    # Of each row: its first place (-1: not placed yet), and its first segment that is not computed together.
    base, alone = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    most = 0
    for row in range(rows):
        most += firsts[row + 1] - firsts[row] + 2 * ((lengths[row] + firsts[row + 1] - firsts[row]) // SEGMENT + 2)
    items, made, at = np.empty((most, 6), np.int64), 0, 0
    each = max(1, min(4, most * kv_heads // (32 * threads)))
    for row in range(rows):
        if base[row] >= 0:
            continue
        first, members = at, 0
        for other in range(row, rows):
            same = starts[other] == starts[row] and groups[other] == groups[row]
            if other == row or (same and base[other] < 0 and _joins(firsts, starts, skip, other, group)):
                base[other], members = at, members + 1
                for token in range(firsts[other], firsts[other + 1]):
                    order[at], tokens[token, 0], tokens[token, 1] = token, other, at
                    at += 1
            if other == row and not _joins(firsts, starts, skip, row, group):
                break
        if members > 1:
            whole = starts[row] // SEGMENT
            for other in range(row, rows):
                if first <= base[other] < at:
                    alone[other] = whole
            for segment in range(0, whole, each):
                made = _add(items, made, row, first, at, segment, min(segment + each, whole), SHARED)
    kept = 0
    some = max(1, min(MOST // group, -(-firsts[-1] * kv_heads // (6 * threads))))
    for row in range(rows):
        width = firsts[row + 1] - firsts[row]
        if width == 0:
            continue
        last = (lengths[row] + width - 1) // SEGMENT + 1
        first, direct = base[row], last == 1 or width * group >= WIDE
        for token in range(firsts[row], firsts[row + 1]):
            tokens[token, 2] = -1 if direct else kept + (token - firsts[row]) * last
        if direct:
            for start in range(0, width, some):
                made = _add(items, made, row, first + start, first + min(start + some, width), 0, last, DIRECT)
            continue
        kept += width * last
        segment = alone[row]
        while segment < last:
            if segment > 0 and (segment + 1) * SEGMENT <= skip[row]:
                segment += 1
                continue
            end = min(segment + each, last)
            made = _add(items, made, row, first, first + width, segment, end, APART)
            segment = end
    return items[:made], tokens, order, kept


@helper
def _joins(firsts, starts, skip, row, group):
    """Whether a row's queries may be computed together with others'."""
    few = 0 < (firsts[row + 1] - firsts[row]) * group < WIDE
    return few and starts[row] >= SEGMENT and skip[row] <= SINKS


@helper
def _add(items, made, row, first, last, start, end, what):
    items[made, 0], items[made, 1], items[made, 2] = row, first, last
    items[made, 3], items[made, 4], items[made, 5] = start, end, what
    return made + 1
