"""The compiled attention over a segment, called by its address.

`segment_for` chooses the kind for a model and compiles it on first use.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..calls import jit
from ..kinds import STEP, TILES
from .outer import AMX, FLOAT32, PAIRS, SEGMENT_CALL, most_queries, segment


class Segment(NamedTuple):
    """The address of a compiled `segment` (outer.py), and the maximum number of queries that it takes at once."""

    address: int
    queries: int


def _float32(number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats):
    segment(0, number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats)


def _pairs(number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats):
    segment(1, number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats)


def _amx(number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats):
    segment(2, number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats)


# One function per kind: numba caches a function by its source, and `segment` needs a literal.
_BY_KIND = {FLOAT32: _float32, PAIRS: _pairs, AMX: _amx}


@cache
def segment_for(dim: int, dot: bool) -> Segment:
    """Return the compiled `segment` for heads of `dim` numbers; dot: whether they are bfloat16.

    AMX needs heads that fill its tiles; other heads are multiplied in registers.
    """
    kind = FLOAT32 if not dot else AMX if TILES and dim % STEP == 0 else PAIRS
    return Segment(jit.address_of(_BY_KIND[kind], SEGMENT_CALL), most_queries(kind))
