"""The compiled products of each kind of weights, called by their addresses.

Contract: `address_of_kind` compiles the product of a kind when it is first asked for it, so that a start compiles
what its model needs alone, and once for all kernels that call it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .calls import jit
from .vectors import MULTIPLY, UNPACK, multiply, unpack


def _bfloat16(columns, w, x, y, groups, steps, stride):
    multiply(0, columns, w, x, y, groups, steps, stride)


def _bfloat16_dot(columns, w, x, y, groups, steps, stride):
    multiply(1, columns, w, x, y, groups, steps, stride)


def _float16(columns, w, x, y, groups, steps, stride):
    multiply(2, columns, w, x, y, groups, steps, stride)


def _int8(columns, w, x, y, groups, steps, stride):
    multiply(4, columns, w, x, y, groups, steps, stride)


def _int8_dot(columns, w, x, y, groups, steps, stride):
    multiply(5, columns, w, x, y, groups, steps, stride)


def _q8_0(columns, w, x, y, groups, steps, stride):
    multiply(6, columns, w, x, y, groups, steps, stride)


def _q8_0_dot(columns, w, x, y, groups, steps, stride):
    multiply(7, columns, w, x, y, groups, steps, stride)


def _q4_1(columns, w, x, y, groups, steps, stride):
    multiply(8, columns, w, x, y, groups, steps, stride)


def _q4_1_dot(columns, w, x, y, groups, steps, stride):
    multiply(9, columns, w, x, y, groups, steps, stride)


def _unpack_int8(w, out, groups, steps):
    unpack(5, w, out, groups, steps)


def _unpack_q8_0(w, out, groups, steps):
    unpack(7, w, out, groups, steps)


def _unpack_q4_1(w, out, groups, steps):
    unpack(9, w, out, groups, steps)


# Written out, because numba keeps a function on disk by its source, and literals alone choose a kind.
_BY_NAME: dict[tuple[str, bool], Callable[..., Any]] = {
    ("bfloat16", False): _bfloat16,
    ("bfloat16", True): _bfloat16_dot,
    ("float16", False): _float16,
    ("int8", False): _int8,
    ("int8", True): _int8_dot,
    ("q8_0", False): _q8_0,
    ("q8_0", True): _q8_0_dot,
    ("q4_1", False): _q4_1,
    ("q4_1", True): _q4_1_dot,
}

_UNPACK: dict[str, Callable[..., Any]] = {"int8": _unpack_int8, "q8_0": _unpack_q8_0, "q4_1": _unpack_q4_1}


@cache
def address_of_unpack(form: str, dot: bool) -> int:
    """The address of `unpack` for quantised weights that are multiplied as bfloat16; 0 for others."""
    return jit.address_of(_UNPACK[form], UNPACK) if dot and form in _UNPACK else 0


@cache
def address_of_kind(form: str, dot: bool) -> int:
    """The address of `multiply` for weights of a format, with or without bfloat16 products."""
    return jit.address_of(_BY_NAME[form, dot], MULTIPLY)
