"""Both products of attention by AMX's tiles: LLVM code for numba, used by `segment` (outer.py).

Keys and values in a cache (layout.py) already have the layout of B tiles: 16 words of a tile's keys, and a tile's
8 pairs of values. Queries and weights of up to 16 queries are A tiles. Invariant: a query's sums have the same
bits whichever queries are next to it, because a tile's rows do not mix.

Tiles read all 16 columns, also those after the last one that a query sees. Their weights are zero, so their values
must be finite: `write` (phases.py) and `lay_out` (paths.py) set the values after the last one to zero. If a value
is not finite, `write` stores zero for it and NaN in its key.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..kinds import BYTE, LONG, count, loaded
from ..tiles import ROW_BYTES, ROWS, configure_tiles, tile_call
from .layout import SEGMENT, TILE

# Numbers of the tiles: 0 to 3 hold sums, 4 queries, 5 weights, 6 keys and 7 values.
_SUMS, _QUERIES, _WEIGHTS, _KEYS, _VALUES = 4, 4, 5, 6, 7
# Bytes of a row of scores; pairs of columns in a tile; and bytes of a tile's weights.
_SCORES, _PAIRS = 4 * SEGMENT, TILE // 2
_WEIGHT_BYTES = 4 * _PAIRS


def configure(b: Any, queries: Any) -> None:
    """Configure the tiles for 1 to 16 queries."""
    rows, sixteen = b.trunc(queries, BYTE), ir.Constant(BYTE, ROWS)
    sums = [(rows, ROW_BYTES)] * _SUMS
    operands = [
        (rows, ROW_BYTES),
        (rows, _WEIGHT_BYTES),
        (sixteen, ROW_BYTES),
        (ir.Constant(BYTE, _PAIRS), ROW_BYTES),
    ]
    configure_tiles(b, sums + operands)


def release(b: Any) -> None:
    tile_call(b, "tilerelease")


def scores(b: Any, queries: Any, stride: Any, words: Any, keys: Any, tiles: Any, scratch: Any) -> None:
    """Write the scores of `tiles` tiles of keys to the rows of `scratch`; words: per query, a multiple of 16."""

    def block(first: Any, width: int) -> None:
        for i in range(width):
            tile_call(b, "tilezero", i)
        places = b.add(keys, b.mul(first, count(8)))
        addresses = [loaded(b, b.add(places, count(8 * i)), LONG) for i in range(width)]
        with cgutils.for_range(b, b.udiv(words, count(16))) as part:
            of_queries, of_keys = (b.mul(part.index, count(size)) for size in (ROW_BYTES, ROWS * ROW_BYTES))
            tile_call(b, "tileloadd64", _QUERIES, b.add(queries, of_queries), stride)
            for i, address in enumerate(addresses):
                tile_call(b, "tileloadd64", _KEYS, b.add(address, of_keys), count(ROW_BYTES))
                tile_call(b, "tdpbf16ps", i, _QUERIES, _KEYS)
        for i in range(width):
            to = b.add(scratch, b.mul(b.add(first, count(i)), count(ROW_BYTES)))
            tile_call(b, "tilestored64", i, to, count(_SCORES))

    _in_fours(b, tiles, block)


def mix(b: Any, weights: Any, values: Any, tiles: Any, out: Any, size: Any) -> None:
    """Write the weighted sums of the values of `tiles` tiles; size: bytes of a result, a multiple of 64."""

    def block(first: Any, width: int) -> None:
        for i in range(width):
            tile_call(b, "tilezero", i)
        place = b.mul(first, count(ROW_BYTES))
        with cgutils.for_range(b, tiles) as tile:
            base = b.add(loaded(b, b.add(values, b.mul(tile.index, count(8))), LONG), place)
            at = b.add(weights, b.mul(tile.index, count(_WEIGHT_BYTES)))
            tile_call(b, "tileloadd64", _WEIGHTS, at, count(_SCORES))
            for i in range(width):
                tile_call(b, "tileloadd64", _VALUES, b.add(base, count(ROW_BYTES * i)), size)
                tile_call(b, "tdpbf16ps", i, _WEIGHTS, _VALUES)
        for i in range(width):
            tile_call(b, "tilestored64", i, b.add(b.add(out, place), count(ROW_BYTES * i)), size)

    _in_fours(b, b.udiv(size, count(ROW_BYTES)), block)


def _in_fours(b: Any, number: Any, block: Any) -> None:
    """Call block(first, 4) as often as it fits in `number`, then block(first, 1) for each of the rest."""
    fours = b.udiv(number, count(_SUMS))
    with cgutils.for_range(b, fours) as four:
        block(b.mul(four.index, count(_SUMS)), _SUMS)
    rest = b.mul(fours, count(_SUMS))
    with cgutils.for_range(b, b.sub(number, rest)) as single:
        block(b.add(rest, single.index), 1)
