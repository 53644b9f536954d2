"""How keys and values lie in a cache of tiles.

Contract: a cache is [layers, 2, rows, key-value heads, tiles, TILE x padded(dim)] of keys, then values. A tile
holds TILE columns in words of four bytes: float32 numbers, or pairs of bfloat16 numbers. Word k of a column's key
is its number k, or its numbers 2k and 2k + 1: keys are [words][TILE]. A word of a value is a number, or the same
number of columns 2k and 2k + 1: values are [columns or pairs of columns][padded(dim)]. So both products of
attention read rows of 16 words, one after another.
"""

from __future__ import annotations

from ...plan import SHARE, SINKS

# Columns of a tile, so that a prefix ends with one; columns whose softmax is made at once.
TILE, SEGMENT = SHARE, 256
__all__ = ["SEGMENT", "SINKS", "TILE", "padded", "tiles_of"]


def padded(dim: int) -> int:
    """Numbers of a head in a tile: `dim` and zeros after it."""
    return dim + -dim % 16


def tiles_of(columns: int) -> int:
    """Tiles that hold so many columns."""
    return -(-columns // TILE)
