"""The compiled attention over a segment, called by its address.

Contract: `address_of_segment` compiles `segment` with or without bfloat16 products when it is first asked for it.
"""

from __future__ import annotations

from functools import cache

from ..calls import jit
from .outer import SEGMENT_CALL, segment


def _float32(number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats):
    segment(0, number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats)


def _bfloat16(number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats):
    segment(1, number, queries, stride, words, keys, values, tiles, columns, seen, room, out, size, stats)


@cache
def address_of_segment(dot: bool) -> int:
    """The address of `segment` for keys and values in bfloat16, or in float32."""
    return jit.address_of(_bfloat16 if dot else _float32, SEGMENT_CALL)
