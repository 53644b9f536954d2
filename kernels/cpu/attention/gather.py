"""Where the columns are that a row sees in a segment: in its own tiles, its prefix's, or those of a tree's path.

Contract: `gather` fills in the addresses that `segment` reads (outer.py); `lay_path` makes the tiles of a path.
"""

from __future__ import annotations

from ..calls.jit import helper
from .layout import SEGMENT, SINKS, TILE
from .paths import TAIL, lay

TILES = SEGMENT // TILE


@helper
def places(caches, which, layer, row, head, kv_heads, size, dot):
    """Addresses of a head's keys and values in the row's own cache (which = 0) or in that of the prefixes (1)."""
    rows, each = caches[3 * which + 1], caches[3 * which + 2] * TILE * size * (2 if dot else 4)
    keys = caches[3 * which] + ((2 * layer * rows + row) * kv_heads + head) * each
    return keys, keys + rows * kv_heads * each


@helper
def lay_path(leaf, layer, row, head, shape, sight, plan, caches, dot, tail):
    """Lay out a leaf's path (paths.py) in TAIL tiles of keys at `tail`, then as many of values."""
    _, kv_heads, dim, size = shape
    keys, values = places(caches, 0, layer, row, head, kv_heads, size, dot)
    each, base = TILE * size * (2 if dot else 4), plan[3][row] - sight[0][row]
    lay(keys, values, base, plan[4][leaf], dim, size, dot, tail, tail + TAIL * each)


@helper
def gather(segment, layer, row, head, shape, step, sight, plan, caches, dot, leaf, tail, tiles):
    """The addresses of the tiles of a segment that a row sees; how many columns they have; which lie between.

    Columns `low` to `high` - 1 of the segment are not seen, and have no tiles. leaf: from the tree's first tile on
    those are read that `lay_path` made at `tail`; -1: the row's own.
    """
    _, kv_heads, _, size = shape
    starts, groups, skip = sight
    first, start = segment * SEGMENT, starts[row]
    end = step[1][row] + step[0][row + 1] - step[0][row] if leaf < 0 else plan[1][leaf, 3] + 1
    own = end if leaf < 0 else plan[3][row] // TILE * TILE
    end = min(SEGMENT, end - first)
    low, high = min(max(SINKS - first, 0), SEGMENT), min(max(skip[row] - first, 0), SEGMENT)
    low, high = (low, high) if low < high else (SEGMENT, SEGMENT)
    each = TILE * size * (2 if dot else 4)
    keys, values = places(caches, 0, layer, row, head, kv_heads, size, dot)
    shared_keys, shared_values = keys, values
    if start:
        shared_keys, shared_values = places(caches, 1, layer, groups[row], head, kv_heads, size, dot)
    found = 0
    for column in range(0, end, TILE):
        if low <= column < high:
            continue
        if first + column < start:
            place = (first + column) // TILE * each
            tiles[0, found], tiles[1, found] = shared_keys + place, shared_values + place
        elif first + column >= own:
            place = (first + column - own) // TILE * each
            tiles[0, found], tiles[1, found] = tail + place, tail + TAIL * each + place
        else:
            place = (first + column - start) // TILE * each
            tiles[0, found], tiles[1, found] = keys + place, values + place
        found += 1
    for i in range(max(found, 1), TILES):
        tiles[0, i], tiles[1, i] = tiles[0, i - 1], tiles[1, i - 1]
    return found * TILE, low, high
