"""A table of what rounds cost, and its file.

Contract: a CostTable gives the milliseconds of one verification, by rows and tokens, and of one forward of the
draft, interpolated between what was measured. Its file is plain JSON; a damaged file counts as a missing one.
Non-goal: measuring (decoding/calibrate.py).
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

Point = tuple[float, float]


class RoundCosts(Protocol):
    """Milliseconds of a round's parts, measured (CostTable) or predicted; `padded` as in CostTable."""

    @property
    def padded(self) -> bool: ...

    def verify_ms(self, rows: int, tokens: float) -> float: ...

    def draft_ms(self, rows: int) -> float: ...


@dataclass(frozen=True)
class CostTable:
    """verify[rows] lists (tokens of all rows, ms), draft[rows] the ms of one forward of the draft; rows ascend.

    `padded` says that a row's padding costs what its tokens cost: tokens are then rows x the widest row.
    `coarse` lists the numbers of rows that were measured in haste, with few points and few repeats.
    """

    verify: dict[int, list[Point]]
    draft: dict[int, float]
    padded: bool
    coarse: tuple[int, ...] = ()

    def verify_ms(self, rows: int, tokens: float) -> float:
        """One verification of `tokens` in all rows together; beyond what was measured the last slope goes on."""
        return _between([(size, _line(points, tokens)) for size, points in self.verify.items()], rows)

    def draft_ms(self, rows: int) -> float:
        """One forward of the draft; 0 where the drafter runs no model."""
        return _between(list(self.draft.items()), rows) if self.draft else 0.0

    def joined(self, other: CostTable) -> CostTable:
        """This table with the other's rows added; the other's figures count where both have the same rows."""
        verify, draft = self.verify | other.verify, self.draft | other.draft
        coarse = {rows for rows in self.coarse if rows not in other.verify} | set(other.coarse)
        return CostTable(
            dict(sorted(verify.items())),
            dict(sorted(draft.items())),
            other.padded,
            tuple(sorted(coarse)),
        )


def _line(points: list[Point], at: float) -> float:
    """Piecewise linear through the points, going on at both ends."""
    if len(points) == 1:
        return points[0][1]
    index = min(max(bisect_left(points, (at, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _between(points: list[Point], at: float) -> float:
    inside = min(max(at, points[0][0]), points[-1][0])
    return _line(points, inside)


def read_table(path: Path | None) -> CostTable | None:
    """The table in the file; None if the file is missing or damaged, or holds what cannot have been measured."""
    if path is None:
        return None
    try:
        stored = json.loads(path.read_text())
        verify = {int(rows): [(x, y) for x, y in points] for rows, points in stored["verify"].items()}
        draft = {int(rows): ms for rows, ms in stored["draft"].items()}
        table = CostTable(verify, draft, stored["padded"], tuple(stored["coarse"]))
        return table if _is_sound(table) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _is_sound(table: CostTable) -> bool:
    """Whether the table could have been measured: finite, ascending, and nothing free of cost that never is."""
    lines = list(table.verify.values())
    numbers = [number for points in lines for point in points for number in point]
    numbers += list(table.draft.values())
    return (
        bool(lines)
        and isinstance(table.padded, bool)
        and set(table.coarse) <= set(table.verify)
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and all(points and min(y for _, y in points) > 0 for points in lines)
        and all(_ascends([x for x, _ in points]) for points in lines)
        and all(before[1] <= behind[1] for points in lines for before, behind in pairwise(points))
        and _ascends([*table.verify])
        and list(table.draft) in ([], list(table.verify))
        and min(table.draft.values(), default=0) >= 0
    )


def _ascends(numbers: list[float]) -> bool:
    """Whether each is more than the one before, and the first more than 0."""
    return all(low < high for low, high in pairwise([0, *numbers]))


def write_table(path: Path | None, table: CostTable) -> None:
    """Write the table if possible: where the cache can't be written, the next start measures again."""
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(table), indent=1))
        os.replace(part, path)
    except OSError:
        return
