"""Divide a step's attention among threads: planned once per step, for all of its layers.

`planned` cuts the attention of a step into items. Each pair of an item and a key-value head is a chunk of a phase.
The columns that a token sees are cut into segments of SEGMENT from position 0. Their results are merged in
ascending order (phases.py), however the segments are divided into items. A kept segment is one whose result is
stored for `merge`. Invariant: a plan changes no bit of a result.

Tokens that form a tree are cut into branches. One branch has the tokens that see all columns of the row up to
their own, as a text's tokens do. Each other branch ends with a leaf and has those of its ancestors that are in no
branch yet. A branch is computed over one layout of columns: the row's own, or its leaf's path (paths.py).
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from .layout import SEGMENT, SINKS

# Kinds of items. DIRECT: everything that some tokens of a branch see. APART: some segments of a branch, each kept
# separately. SHARED: segments that several rows of a prefix, or several branches of a row, all see completely;
# they are read once for all of them.
DIRECT, APART, SHARED = 0, 1, 2
# A row with at least MIN_WIDE_QUERIES queries per key-value head is not combined with other rows, because its own
# queries already make good use of each column that is read. A DIRECT item has at most MAX_DIRECT_QUERIES queries.
MIN_WIDE_QUERIES, MAX_DIRECT_QUERIES = 48, 96


@kernel
def planned(firsts, lengths, starts, groups, gap_ends, bases, sees, depths, group, kv_heads, threads):
    """Return items, tokens, the order of the tokens, and the number of kept segments.

    Args:
        firsts, lengths, starts, groups, gap_ends: int64, see `attend` (phases.py).
        bases, sees, depths: see tree.py; empty if the tokens form texts.
        group: query heads per key-value head.

    Returns:
        items int64 [I, 6]: row, first and last + 1 token in the order, first and last + 1 segment, kind. tokens
        int64 [N, 5]: row, place in the order, its first kept segment or -1, position, leaf of its branch or -1 for
        the row's own layout. order int64 [N]: the tokens; rows that are computed together, and tokens of a branch,
        are next to each other. The number of kept segments.
    """
    rows = len(lengths)
    order, tokens = np.empty(firsts[-1], np.int64), np.empty((firsts[-1], 5), np.int64)
    # For each row: its first place in the order (-1: it has no place yet), and the first segment that the row does
    # not share.
    first_place, first_own_segment = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    max_items = 0
    for row in range(rows):
        width = firsts[row + 1] - firsts[row]
        max_items += width + 2 * ((lengths[row] + width) // SEGMENT + 2)
    # A branch has one item, or one for each of the at most two segments that its path lies in.
    items, num_items, at = np.empty((max_items + len(sees), 6), np.int64), 0, 0
    item_segments = max(1, min(4, max_items * kv_heads // (32 * threads)))
    for row in range(rows):
        if first_place[row] >= 0:
            continue
        first, members = at, 0
        for other in range(row, rows):
            same = starts[other] == starts[row] and groups[other] == groups[row]
            if other == row or (
                same and first_place[other] < 0 and _may_share(firsts, starts, gap_ends, other, group)
            ):
                first_place[other], members = at, members + 1
                at = _place_tokens(tokens, order, at, other, firsts, lengths, bases, sees, depths)
            if other == row and not _may_share(firsts, starts, gap_ends, row, group):
                break
        if members > 1:
            shared_segments = starts[row] // SEGMENT
            for other in range(row, rows):
                if first <= first_place[other] < at:
                    first_own_segment[other] = shared_segments
            for segment in range(0, shared_segments, item_segments):
                num_items = _add_item(
                    items, num_items, row, first, at, segment, min(segment + item_segments, shared_segments),
                    SHARED,
                )  # fmt: skip
    num_kept = 0
    item_tokens = max(1, min(MAX_DIRECT_QUERIES // group, -(-firsts[-1] * kv_heads // (6 * threads))))
    for row in range(rows):
        width = firsts[row + 1] - firsts[row]
        if width == 0:
            continue
        last, branched = 0, False
        for token in range(firsts[row], firsts[row + 1]):
            last, branched = max(last, tokens[token, 3] // SEGMENT + 1), branched or tokens[token, 4] >= 0
        direct = last == 1 or width * group >= MIN_WIDE_QUERIES
        for token in range(firsts[row], firsts[row + 1]):
            tokens[token, 2] = -1 if direct else num_kept + (token - firsts[row]) * last
        shared_segments = bases[row] // SEGMENT if branched else 0
        if direct:
            num_items = _add_direct_items(
                items, num_items, tokens, order, row, first_place[row], first_place[row] + width, item_tokens, last
            )
        else:
            num_kept += width * last
            num_items = _add_apart_items(
                items, num_items, tokens, order, row, first_place[row], first_place[row] + width,
                first_own_segment[row], shared_segments, last, item_segments, gap_ends[row],
            )  # fmt: skip
    return items[:num_items], tokens, order, num_kept


@helper
def _place_tokens(tokens, order, at, row, firsts, lengths, bases, sees, depths):
    """Put a row's tokens at places `at` and on, branch by branch; return the next place.

    The tokens of a branch are consecutive, and so are their positions.
    """
    first, end = firsts[row], firsts[row + 1]
    before = lengths[row] - bases[row] if len(sees) else 0
    for token in range(first, end):
        tokens[token, 0], tokens[token, 1], tokens[token, 4] = row, -1, -1
        tokens[token, 3] = bases[row] + depths[token] if len(sees) else lengths[row] + token - first
        if len(sees) == 0 or sees[token] == (1 << (before + token - first + 1)) - 1:
            order[at], tokens[token, 1] = token, at
            at += 1
    # Go from the last token to the first: then a token that is in no branch yet is a leaf.
    for leaf in range(end - 1, first - 1, -1):
        for token in range(first, leaf + 1 if tokens[leaf, 1] < 0 else first):
            if tokens[token, 1] < 0 and (sees[leaf] >> (before + token - first)) & 1:
                order[at], tokens[token, 1], tokens[token, 4] = token, at, leaf
                at += 1
    return at


@helper
def _end_of_branch(tokens, order, start, end):
    """Return the first place after `start` that belongs to another branch, or `end`."""
    stop = start + 1
    while stop < end and tokens[order[stop], 4] == tokens[order[start], 4]:
        stop += 1
    return stop


@helper
def _add_direct_items(items, num_items, tokens, order, row, first, end, item_tokens, last):
    """Add a row's DIRECT items, each of up to `item_tokens` tokens of a branch; return the number of all items."""
    while first < end:
        stop = _end_of_branch(tokens, order, first, min(first + item_tokens, end))
        num_items, first = _add_item(items, num_items, row, first, stop, 0, last, DIRECT), stop
    return num_items


@helper
def _add_apart_items(
    items, num_items, tokens, order, row, first, end, segment, shared_segments, last, item_segments, gap_end
):
    """Add items for a row's segments up to `last`.

    Segments below `shared_segments` are computed once for all branches, the others for each branch. Returns the
    number of all items.
    """
    while segment < shared_segments:
        stop = min(segment + item_segments, shared_segments)
        num_items, segment = _add_item(items, num_items, row, first, end, segment, stop, SHARED), stop
    start = segment
    while first < end:
        branch, segment = _end_of_branch(tokens, order, first, end), start
        while segment < last:
            if segment > 0 and (segment + 1) * SEGMENT <= gap_end:
                segment += 1
                continue
            stop = min(segment + item_segments, last)
            num_items, segment = _add_item(items, num_items, row, first, branch, segment, stop, APART), stop
        first = branch
    return num_items


@helper
def _may_share(firsts, starts, gap_ends, row, group):
    """Return whether a row's queries may be computed together with those of other rows."""
    is_narrow = 0 < (firsts[row + 1] - firsts[row]) * group < MIN_WIDE_QUERIES
    return is_narrow and starts[row] >= SEGMENT and gap_ends[row] <= SINKS


@helper
def _add_item(items, num_items, row, first, last, start, end, kind):
    items[num_items, 0], items[num_items, 1], items[num_items, 2] = row, first, last
    items[num_items, 3], items[num_items, 4], items[num_items, 5] = start, end, kind
    return num_items + 1
