"""The layout of keys and values in a cache of tiles.

A cache is [layers, 2, rows, key-value heads, tiles, TILE x padded(dim)]: keys, then values. A tile holds TILE
columns in words of four bytes. A word is a float32 number or a pair of bfloat16 numbers:

- keys are [words][TILE]; word k of a column's key is its number k, or its numbers 2k and 2k + 1;
- values are [columns or pairs of columns][padded(dim)]; a word is one number, or the same number of columns 2k and
  2k + 1.

So both products of attention read rows of 16 words, one after another.
"""

from __future__ import annotations

from ...plan import PREFIX_UNIT, SINKS

# TILE is PREFIX_UNIT, so that every prefix ends at the end of a tile. SEGMENT is the number of columns whose
# softmax is computed at once.
TILE, SEGMENT = PREFIX_UNIT, 256
__all__ = ["SEGMENT", "SINKS", "TILE", "padded", "tiles_of"]


def padded(dim: int) -> int:
    """Return how many numbers a column of one head takes in a tile: `dim`, rounded up to a multiple of 16."""
    return dim + -dim % 16


def tiles_of(columns: int) -> int:
    """Return the number of tiles that hold `columns` columns."""
    return -(-columns // TILE)
