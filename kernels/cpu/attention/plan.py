"""Who computes which part of a step's attention: planned once a step, for all of its layers.

Contract: `planned` cuts the attention of a step into items, which are the chunks of a phase, one for each item and
key-value head. What a token sees is cut into segments of SEGMENT columns from position 0, whose results are merged
in ascending order (phases.py), however they are cut into items: a plan changes no bit of a result.

Tokens that form a tree are cut into branches. Of one branch are those that see all columns of the row up to their
own, as a text's tokens do; of another the ancestors of its last token, the leaf, that are in none before. A branch
is computed over one layout of columns: the row's own, or its leaf's path (paths.py).
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from .layout import SEGMENT, SINKS

# What an item computes. DIRECT: all that some tokens of a branch see, to the end. APART: some segments of a
# branch, each kept by itself. SHARED: the same for all who see whole segments: rows of a prefix, a row's branches.
DIRECT, APART, SHARED = 0, 1, 2
# A row of as many queries a head reads its columns often enough by itself; queries of a DIRECT item.
WIDE, MOST = 48, 96


@kernel
def planned(firsts, lengths, starts, groups, skip, bases, sees, depths, group, kv_heads, threads):
    """Items, tokens, the order of the tokens, and how many segments are kept.

    firsts [B + 1], lengths, starts, groups, skip, bases [B], sees, depths [N]: int64, see phases.py. group: query
    heads of a key-value head. items int64 [I, 6]: row, first and last + 1 token in order, first and last + 1
    segment, what it computes. tokens int64 [N, 5]: row, place in the order, the first of its kept segments or -1,
    position, the leaf of its branch or -1 for the row's own layout. order int64 [N]: the tokens, those of rows
    that are computed together side by side, and those of a branch.
    """
    rows = len(lengths)
    order, tokens = np.empty(firsts[-1], np.int64), np.empty((firsts[-1], 5), np.int64)
    # Of each row: its first place (-1: not placed yet), and its first segment that is not computed together.
    base, alone = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    most = 0
    for row in range(rows):
        width = firsts[row + 1] - firsts[row]
        most += width + 2 * ((lengths[row] + width) // SEGMENT + 2)
    # A branch has one item, or one for each of the at most two segments that its path lies in.
    items, made, at = np.empty((most + len(sees), 6), np.int64), 0, 0
    each = max(1, min(4, most * kv_heads // (32 * threads)))
    for row in range(rows):
        if base[row] >= 0:
            continue
        first, members = at, 0
        for other in range(row, rows):
            same = starts[other] == starts[row] and groups[other] == groups[row]
            if other == row or (same and base[other] < 0 and _joins(firsts, starts, skip, other, group)):
                base[other], members = at, members + 1
                at = _place(tokens, order, at, other, firsts, lengths, bases, sees, depths)
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
        last, branched = 0, False
        for token in range(firsts[row], firsts[row + 1]):
            last, branched = max(last, tokens[token, 3] // SEGMENT + 1), branched or tokens[token, 4] >= 0
        direct = last == 1 or width * group >= WIDE
        for token in range(firsts[row], firsts[row + 1]):
            tokens[token, 2] = -1 if direct else kept + (token - firsts[row]) * last
        whole = bases[row] // SEGMENT if branched else 0
        if direct:
            made = _divide(items, made, tokens, order, row, base[row], base[row] + width, some, last)
        else:
            kept += width * last
            made = _divide_apart(
                items, made, tokens, order, row, base[row], base[row] + width, alone[row], whole, last, each,
                skip[row],
            )  # fmt: skip
    return items[:made], tokens, order, kept


@helper
def _place(tokens, order, at, row, firsts, lengths, bases, sees, depths):
    """Put a row's tokens at places `at` and on, branch by branch; returns the next place.

    Within a branch, tokens stand one after another, so their positions follow one another as well.
    """
    first, end = firsts[row], firsts[row + 1]
    before = lengths[row] - bases[row] if len(sees) else 0
    for token in range(first, end):
        tokens[token, 0], tokens[token, 1], tokens[token, 4] = row, -1, -1
        tokens[token, 3] = bases[row] + depths[token] if len(sees) else lengths[row] + token - first
        if len(sees) == 0 or sees[token] == (1 << (before + token - first + 1)) - 1:
            order[at], tokens[token, 1] = token, at
            at += 1
    # From the last token on, as a token in no branch yet then is a leaf.
    for leaf in range(end - 1, first - 1, -1):
        for token in range(first, leaf + 1 if tokens[leaf, 1] < 0 else first):
            if tokens[token, 1] < 0 and (sees[leaf] >> (before + token - first)) & 1:
                order[at], tokens[token, 1], tokens[token, 4] = token, at, leaf
                at += 1
    return at


@helper
def _end_of_branch(tokens, order, start, end):
    """The first place from `start` on that is of another branch, or `end`."""
    stop = start + 1
    while stop < end and tokens[order[stop], 4] == tokens[order[start], 4]:
        stop += 1
    return stop


@helper
def _divide(items, made, tokens, order, row, first, end, some, last):
    """A row's DIRECT items, each of up to `some` tokens of a branch."""
    while first < end:
        stop = _end_of_branch(tokens, order, first, min(first + some, end))
        made, first = _add(items, made, row, first, stop, 0, last, DIRECT), stop
    return made


@helper
def _divide_apart(items, made, tokens, order, row, first, end, segment, whole, last, each, skip):
    """Items of a row's segments up to `last`: those below `whole` for all of its branches, others for each."""
    while segment < whole:
        stop = min(segment + each, whole)
        made, segment = _add(items, made, row, first, end, segment, stop, SHARED), stop
    start = segment
    while first < end:
        branch, segment = _end_of_branch(tokens, order, first, end), start
        while segment < last:
            if segment > 0 and (segment + 1) * SEGMENT <= skip:
                segment += 1
                continue
            stop = min(segment + each, last)
            made, segment = _add(items, made, row, first, branch, segment, stop, APART), stop
        first = branch
    return made


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
