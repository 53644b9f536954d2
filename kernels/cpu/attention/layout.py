"""How keys and values lie in a cache of tiles.

Contract: a cache is [layers, 2, rows, key-value heads, tiles, TILE x padded(dim)] of keys, then values. A tile
holds TILE columns in words of four bytes: float32 numbers, or pairs of bfloat16 numbers. Word k of a column's key is
its number k, or its numbers 2k and 2k + 1: keys are [words][TILE]. A word of a value is a number, or the same number
of columns 2k and 2k + 1: values are [columns or pairs of columns][padded(dim)]. So both products of attention read
rows of 16 words, one after another.
"""

from __future__ import annotations

# Columns of a tile; columns whose softmax is made at once, and those that a windowed step always sees.
TILE, SEGMENT, SINKS = 16, 256, 64


def padded(dim: int) -> int:
    """Numbers of a head in a tile: `dim` and zeros behind it."""
    return dim + -dim % 16
