"""The path of a tree's token, laid out in tiles as a text's columns would be; also moves columns inside a cache.

Attention adds up columns in pairs, registers and segments. So a token of a tree gets the same bits as at the end
of a text only if its path is in consecutive columns. Therefore `lay_out` copies the path to tiles of the thread:
first the columns that precede the tree in its first tile, then the columns of the path. Column `base` + i of this
layout is the path's i-th column. The values after the path in its last tile are zeroed, because they are read with
zero weights (tiled.py). Columns are those of the row's own cache.
"""

from __future__ import annotations

import numpy as np

from ...plan import MAX_TREE_TOKENS
from ..calls.jit import helper, kernel
from ..elements import copy_bytes, float_at, store_float, store_u16, u16_at, zero_bytes
from .layout import TILE

# The maximum number of tiles of a layout: the longest path, beginning at a tile's last column, needs this many.
TAIL = (TILE - 1 + MAX_TREE_TOKENS + TILE - 1) // TILE


@helper
def lay_out(keys, values, base, sees, dim, size, dot, to_keys, to_values):
    """Copy the columns base + j, for each bit j of `sees`, to the tiles at `to_keys` and `to_values`.

    The first copy goes to column base % TILE, the others follow it.

    keys, values: addresses of a head's tiles. to_keys, to_values: addresses of up to TAIL tiles each.
    """
    tile_bytes, place = TILE * size * (2 if dot else 4), base % TILE
    if place:
        tile = base // TILE * tile_bytes
        copy_bytes(np.uintp(to_keys), np.uintp(keys + tile), tile_bytes)
        copy_bytes(np.uintp(to_values), np.uintp(values + tile), ((place + 1) // 2 if dot else place) * 4 * size)
    column = base
    while sees:
        if sees & 1:
            _copy(keys, values, column, to_keys, to_values, place, dim, size, dot)
            place += 1
        sees, column = sees >> 1, column + 1
    if dot and place % TILE:
        zero_after(to_values + place // TILE * tile_bytes, place % TILE - 1, dim, size)


@helper
def zero_after(values, column, dim, size):
    """Zero the bfloat16 values of a tile at `values` after a column; size: numbers of a padded value."""
    if column % 2 == 0:
        to = np.uintp(values + column // 2 * 4 * size + 2)
        for i in range(np.uintp(dim)):
            store_u16(to + np.uintp(4) * i, np.uint16(0))
    first = column // 2 + 1
    zero_bytes(np.uintp(values + first * 4 * size), (TILE // 2 - first) * 4 * size)


@helper
def _copy(keys, values, column, to_keys, to_values, place, dim, size, dot):
    """Copy a column's key and value to column `place` of the tiles at `to_keys` and `to_values`."""
    tile_bytes = TILE * size * (2 if dot else 4)
    tile, inside = column // TILE * tile_bytes, column % TILE
    to_tile, to_inside = place // TILE * tile_bytes, place % TILE
    source, to = np.uintp(keys + tile + 4 * inside), np.uintp(to_keys + to_tile + 4 * to_inside)
    for word in range(np.uintp(dim // 2 if dot else dim)):
        store_float(to + np.uintp(4 * TILE) * word, float_at(source + np.uintp(4 * TILE) * word))
    if dot:
        source = np.uintp(values + tile + inside // 2 * 4 * size + inside % 2 * 2)
        to = np.uintp(to_values + to_tile + to_inside // 2 * 4 * size + to_inside % 2 * 2)
        for i in range(np.uintp(size)):
            store_u16(to + np.uintp(4) * i, u16_at(source + np.uintp(4) * i))
    else:
        source = np.uintp(values + tile + inside * 4 * size)
        copy_bytes(np.uintp(to_values + to_tile + to_inside * 4 * size), source, 4 * size)


@kernel
def move(address, layers, rows, kv_heads, tiles, row, first, sources, dim, size, dot):
    """Move a row's columns `sources` int64 [K], ascending, to its columns first, first + 1, ... in every layer.

    No source may lie below its target. address: of a cache's tiles, [layers, 2, rows, kv_heads, tiles].
    """
    head_bytes = tiles * TILE * size * (2 if dot else 4)
    for layer in range(layers):
        for head in range(kv_heads):
            keys = address + ((2 * layer * rows + row) * kv_heads + head) * head_bytes
            values = keys + rows * kv_heads * head_bytes
            for i in range(len(sources)):
                if sources[i] != first + i:
                    _copy(keys, values, sources[i], keys, values, first + i, dim, size, dot)
