"""The compiled products of each kind of weights, called by their addresses.

`address_of_kind` compiles a product on first use. So a start compiles only the products that its model needs, and
each only once for all kernels that call it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .calls import jit
from .kinds import TILES
from .tiles import multiply_tiles
from .vectors import MULTIPLY, multiply


def _bfloat16(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(0, columns, w, x, y, steps, stride, ahead, pace, gap)


def _bfloat16_dot(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(1, columns, w, x, y, steps, stride, ahead, pace, gap)


def _bfloat16_tiles(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply_tiles(columns, w, x, y, steps, stride, ahead, pace, gap)


def _float16(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(2, columns, w, x, y, steps, stride, ahead, pace, gap)


def _int8(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(4, columns, w, x, y, steps, stride, ahead, pace, gap)


def _q8_0(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(6, columns, w, x, y, steps, stride, ahead, pace, gap)


def _q4_1(columns, w, x, y, steps, stride, ahead, pace, gap):
    multiply(8, columns, w, x, y, steps, stride, ahead, pace, gap)


# One function per kind: numba caches a function by its source, and `multiply` needs a literal kind.
_BY_NAME: dict[tuple[str, bool], Callable[..., Any]] = {
    ("bfloat16", False): _bfloat16,
    ("bfloat16", True): _bfloat16_tiles if TILES else _bfloat16_dot,
    ("float16", False): _float16,
    ("int8", False): _int8,
    ("q8_0", False): _q8_0,
    ("q4_1", False): _q4_1,
}


@cache
def address_of_kind(form: str, dot: bool) -> int:
    """Return the address of `multiply` for weights of a format; dot: whether bfloat16 products are native."""
    return jit.address_of(_BY_NAME[form, dot], MULTIPLY)
