"""The check that a row's results do not depend on the other rows; the tests of every layer call it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def check_rows_alone(
    compute: Callable[[list[int]], Sequence[Any]], count: int, alone: Iterable[int] | None = None
) -> list[Any]:
    """Check that each row has the same result among all rows, in another order, and by itself.

    Args:
        compute: Returns one result per given row index, in that order: for example bits, tokens or verdicts.
        count: The number of rows.
        alone: The rows that are also computed by themselves; by default all rows.

    Returns:
        The results of all rows.
    """
    together = list(compute(list(range(count))))
    order = random.Random(1).sample(range(count), count)
    for row, result in zip(order, compute(order), strict=True):
        assert _same(result, together[row]), f"row {row} in another order"
    for row in range(count) if alone is None else alone:
        (result,) = compute([row])
        assert _same(result, together[row]), f"row {row} by itself"
    return together


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
