"""Find the columns of a segment that a row sees: in its own tiles, in its prefix's, or in those of a tree's path.

`gather` fills in the addresses that `segment` (outer.py) reads; `lay_out_path` makes the tiles of a path.
"""

from __future__ import annotations

from ..calls.jit import helper
from .layout import SEGMENT, SINKS, TILE
from .paths import TAIL, lay_out

TILES = SEGMENT // TILE


@helper
def head_addresses(caches, which, layer, row, head, kv_heads, size, dot):
    """Return the addresses of a head's keys and values.

    They are in the rows' cache (which = 0) or in the prefixes' cache (which = 1).
    """
    rows, head_bytes = caches[3 * which + 1], caches[3 * which + 2] * TILE * size * (2 if dot else 4)
    keys = caches[3 * which] + ((2 * layer * rows + row) * kv_heads + head) * head_bytes
    return keys, keys + rows * kv_heads * head_bytes


@helper
def lay_out_path(leaf, layer, row, head, shape, visible, plan, caches, dot, tail):
    """Lay out a leaf's path (paths.py): TAIL tiles of keys at `tail`, then TAIL tiles of values."""
    _, kv_heads, dim, size = shape
    keys, values = head_addresses(caches, 0, layer, row, head, kv_heads, size, dot)
    tile_bytes, base = TILE * size * (2 if dot else 4), plan[3][row] - visible[0][row]
    lay_out(keys, values, base, plan[4][leaf], dim, size, dot, tail, tail + TAIL * tile_bytes)


@helper
def gather(segment, layer, row, head, shape, step, visible, plan, caches, dot, leaf, tail, tiles):
    """Write the addresses of a segment's tiles that a row sees; return (their columns, low, high).

    Columns `low` to `high` - 1 of the segment are hidden and have no tiles. leaf: the leaf of a tree's path, or
    -1. For a path, the tiles from the tree's first one on are read from `tail`, where `lay_out_path` wrote them;
    for -1, from the row's own cache.
    """
    _, kv_heads, _, size = shape
    starts, groups, gap_ends = visible
    first, start = segment * SEGMENT, starts[row]
    end = step[1][row] + step[0][row + 1] - step[0][row] if leaf < 0 else plan[1][leaf, 3] + 1
    path_start = end if leaf < 0 else plan[3][row] // TILE * TILE
    end = min(SEGMENT, end - first)
    low, high = min(max(SINKS - first, 0), SEGMENT), min(max(gap_ends[row] - first, 0), SEGMENT)
    low, high = (low, high) if low < high else (SEGMENT, SEGMENT)
    tile_bytes = TILE * size * (2 if dot else 4)
    keys, values = head_addresses(caches, 0, layer, row, head, kv_heads, size, dot)
    shared_keys, shared_values = keys, values
    if start:
        shared_keys, shared_values = head_addresses(caches, 1, layer, groups[row], head, kv_heads, size, dot)
    num_tiles = 0
    for column in range(0, end, TILE):
        if low <= column < high:
            continue
        if first + column < start:
            place = (first + column) // TILE * tile_bytes
            tiles[0, num_tiles], tiles[1, num_tiles] = shared_keys + place, shared_values + place
        elif first + column >= path_start:
            place = (first + column - path_start) // TILE * tile_bytes
            tiles[0, num_tiles], tiles[1, num_tiles] = tail + place, tail + TAIL * tile_bytes + place
        else:
            place = (first + column - start) // TILE * tile_bytes
            tiles[0, num_tiles], tiles[1, num_tiles] = keys + place, values + place
        num_tiles += 1
    for i in range(max(num_tiles, 1), TILES):
        tiles[0, i], tiles[1, i] = tiles[0, i - 1], tiles[1, i - 1]
    return num_tiles * TILE, low, high
