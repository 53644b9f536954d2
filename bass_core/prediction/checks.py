"""Checks of the numbers that a prediction is asked for.

Contract: each returns what to use, or raises RequestError with one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import RequestError


def rate(acceptance: object) -> float:
    """A probability."""
    known = isinstance(acceptance, int | float) and not isinstance(acceptance, bool) and math.isfinite(acceptance)
    if not known or not 0 <= float(acceptance) <= 1:  # type: ignore[arg-type]
        raise RequestError(f"acceptance must be a number from 0 to 1; got {acceptance!r}.")
    return float(acceptance)  # type: ignore[arg-type]


def whole(what: str, values: Sequence[int], low: int, high: int) -> list[int]:
    """The values, which must be whole numbers within these bounds, at least one."""
    if not values or not all(type(one) is int and low <= one <= high for one in values):
        raise RequestError(f"{what} must be whole numbers from {low} to {high}; got {values!r}.")
    return list(values)
