"""What a prediction may be made of: known names, and numbers that something can have.

Contract: a RequestError of one sentence for everything else, with the known names or the number's limits in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..errors import RequestError
from .hardware import Assumptions


def find(what: str, given: Any, known: dict[str, Any], own: type) -> Any:
    """The known name as the table spells it, or the user's own numbers."""
    if isinstance(given, own):
        return given
    names = {name.lower(): name for name in known}
    if isinstance(given, str) and given.lower() in names:
        return names[given.lower()]
    ours = ", ".join(names)
    raise RequestError(f"{what} must be one of {ours}, or a {own.__name__} of your own; got {given!r}.")


def check_numbers(what: str, given: Any, positive: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Refuse numbers that nothing can have; None stands where the class allows it."""
    optional = {one.name for one in fields(given) if one.default is None}
    for name in (*positive, *others):
        number = getattr(given, name)
        if number is None and name in optional:
            continue
        sound = isinstance(number, int | float) and math.isfinite(number) and number >= 0
        if not sound or (name in positive and number == 0):
            least = "above 0" if name in positive else "0 or more"
            raise RequestError(f"{name} of {what} must be a number {least}; got {number!r}.")


def check_assumptions(assumed: Any) -> None:
    """Refuse shares above 1, and numbers that nothing can have."""
    if not isinstance(assumed, Assumptions):
        raise RequestError(f"assumed must be Assumptions; got {assumed!r}.")
    shares = ("bandwidth", "compute", "link")
    check_numbers("assumed", assumed, shares, ("layer_us", "allreduce_us"))
    for name in shares:
        if (share := getattr(assumed, name)) > 1:
            raise RequestError(
                f"{name} of assumed must be at most 1, the whole of the datasheet's; got {share!r}."
            )


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
