"""Checks of a prediction's arguments: known names and plausible numbers, else a RequestError.

The error lists the known names or the number's limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..errors import RequestError
from .hardware import Assumptions


def find(argument: str, value: Any, known: dict[str, Any], own_type: type) -> Any:
    """Return a known name as `known` spells it, or a user's own object of type `own_type` unchanged."""
    if isinstance(value, own_type):
        return value
    spellings = {name.lower(): name for name in known}
    if isinstance(value, str) and value.lower() in spellings:
        return spellings[value.lower()]
    choices = ", ".join(spellings)
    raise RequestError(f"{argument} must be one of {choices}, or your own {own_type.__name__}; got {value!r}.")


def check_numbers(argument: str, value: Any, positive: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Refuse impossible numbers in these fields of `value`. None is allowed if it is the field's default."""
    optional = {field.name for field in fields(value) if field.default is None}
    for name in (*positive, *others):
        number = getattr(value, name)
        if number is None and name in optional:
            continue
        sound = isinstance(number, int | float) and math.isfinite(number) and number >= 0
        if not sound or (name in positive and number == 0):
            least = "above 0" if name in positive else "0 or more"
            raise RequestError(f"{name} of {argument} must be a number {least}; got {number!r}.")


_TIMES = tuple(field.name for field in fields(Assumptions) if field.name.endswith("_us"))


def check_assumptions(assumed: Any) -> None:
    """Refuse shares above 1 and impossible numbers."""
    if not isinstance(assumed, Assumptions):
        raise RequestError(f"assumed must be Assumptions; got {assumed!r}.")
    shares = ("bandwidth", "compute", "link")
    check_numbers("assumed", assumed, shares, _TIMES)
    for name in shares:
        if (share := getattr(assumed, name)) > 1:
            raise RequestError(
                f"{name} of assumed must be at most 1, the datasheet's whole figure; got {share!r}."
            )


def rate(acceptance: object) -> float:
    """Return a probability as float, or refuse it."""
    is_number = (
        isinstance(acceptance, int | float) and not isinstance(acceptance, bool) and math.isfinite(acceptance)
    )
    if not is_number or not 0 <= float(acceptance) <= 1:  # type: ignore[arg-type]
        raise RequestError(f"acceptance must be a number from 0 to 1; got {acceptance!r}.")
    return float(acceptance)  # type: ignore[arg-type]


def whole(argument: str, values: Sequence[int], low: int, high: int) -> list[int]:
    """Return the values, or refuse them: at least one whole number, all within these bounds."""
    if not values or not all(type(value) is int and low <= value <= high for value in values):
        raise RequestError(f"{argument} must be whole numbers from {low} to {high}; got {values!r}.")
    return list(values)
