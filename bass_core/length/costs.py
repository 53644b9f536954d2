"""What rounds cost: a table of measured times, its file, and its correction by what rounds really take.

Contract: a CostTable gives the milliseconds of one verification, by rows and tokens, and of one forward of the
draft, interpolated between what was measured. Its file is plain JSON; a damaged file counts as a missing one.
The table knows the shape: what a wider step costs beside a narrower one. It was measured at another time, with
other texts, perhaps under load. So in `CorrectedCosts` each round's own time corrects it, where it was seen and,
by the same factor, around there: by medians, because a machine hiccups, of late rounds only, because a machine
changes. Untimed (a simulated clock's costs are what its rounds take), the table counts as it is.
Non-goal: measuring (decode/calibrate.py).
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]


class RoundCosts(Protocol):
    """Milliseconds of a round's parts, measured (CostTable) or predicted; `padded` as in CostTable."""

    @property
    def padded(self) -> bool: ...

    def verify_ms(self, rows: int, tokens: float) -> float: ...

    def draft_ms(self, rows: int) -> float: ...

    def proposal_ms(self, rows: int) -> float: ...


@dataclass(frozen=True)
class CostTable:
    """verify[rows] lists (tokens of all rows, ms), draft[rows] the ms of one forward of the draft; rows ascend.

    `proposal` has the rows of `draft`, or none: the ms that a proposal takes beside its forwards. `padded` says
    that a row's padding costs what its tokens cost: tokens are then rows x the widest row. `coarse` lists the
    numbers of rows that were measured in haste, with few points and few repeats.
    """

    verify: dict[int, list[Point]]
    draft: dict[int, float]
    padded: bool
    coarse: tuple[int, ...] = ()
    proposal: dict[int, float] = field(default_factory=dict)

    def verify_ms(self, rows: int, tokens: float) -> float:
        """One verification of `tokens` in all rows together; beyond what was measured the last slope goes on."""
        return _between([(size, _line(points, tokens)) for size, points in self.verify.items()], rows)

    def draft_ms(self, rows: int) -> float:
        """One forward of the draft; 0 where the drafter runs no model."""
        return _between(list(self.draft.items()), rows) if self.draft else 0.0

    def proposal_ms(self, rows: int) -> float:
        """What a proposal takes beside its forwards: catching up, states, and what surrounds a call."""
        return _between(list(self.proposal.items()), rows) if self.proposal else 0.0

    def joined(self, other: CostTable) -> CostTable:
        """This table with the other's rows added; the other's figures count where both have the same rows."""
        verify, draft = self.verify | other.verify, self.draft | other.draft
        proposal = self.proposal | other.proposal
        coarse = {rows for rows in self.coarse if rows not in other.verify} | set(other.coarse)
        return CostTable(
            dict(sorted(verify.items())),
            dict(sorted(draft.items())),
            other.padded,
            tuple(sorted(coarse)),
            dict(sorted(proposal.items())),
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
        stored = json.loads(path.read_text(encoding="utf-8"))
        verify = {int(rows): [(x, y) for x, y in points] for rows, points in stored["verify"].items()}
        draft = {int(rows): ms for rows, ms in stored["draft"].items()}
        proposal = {int(rows): ms for rows, ms in stored["proposal"].items()}
        table = CostTable(verify, draft, stored["padded"], tuple(stored["coarse"]), proposal)
        return table if _is_sound(table) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _is_sound(table: CostTable) -> bool:
    """Whether the table could have been measured: finite, ascending, and nothing free of cost that never is."""
    lines = list(table.verify.values())
    numbers = [number for points in lines for point in points for number in point]
    numbers += [*table.draft.values(), *table.proposal.values()]
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
        and list(table.proposal) in ([], list(table.draft))
        and min([*table.draft.values(), *table.proposal.values()], default=0) >= 0
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
        part.write_text(json.dumps(asdict(table), indent=1), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        return


Array = NDArray[np.floating[Any]]

# Rounds of one size, or proposals, of which the median counts, and the rounds for which one is remembered.
KEPT, FRESH = 5, 128
# A round that took more or less than this many times what the table says counts as if it took so many times.
MOST = 8.0
# Reading one token that was written meanwhile takes this share of a forward of the draft: 0.13 ms of 1 ms for the
# shipped head on two cores, 200 tokens at once.
READING = 1 / 8


class CorrectedCosts:
    """Milliseconds of verifications and drafts; arguments as for RoundCosts, over arrays."""

    def __init__(self, table: RoundCosts, timed: bool = True) -> None:
        self.table, self.timed = table, timed
        self._tables: dict[int, tuple[Array, Array]] = {}
        # By rows and tokens: (the round, its time over the table's) of the last few.
        self._seen: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._any: deque[float] = deque([1.0], KEPT)
        self._drafting: deque[float] = deque([1.0], KEPT)
        self._factors: dict[int, tuple[Array, Array]] = {}
        self._round = 0

    @property
    def padded(self) -> bool:
        """Whether a row's padding costs what its tokens cost."""
        return self.table.padded

    def verify_ms(self, rows: int, tokens: Array) -> Array:
        """Rounds that verify so many tokens of all rows, ascending, without what drafting them takes."""
        ms = self._as_measured(rows, tokens)
        if rows in self._factors:
            ms = ms * np.interp(tokens, *self._factors[rows])
        elif self.timed:
            ms = ms * median(self._any)
        # A wider step is never cheaper: if it seems so, a narrower one was measured in a bad moment.
        return np.maximum.accumulate(ms)

    def draft_ms(self, rows: int, forwards: Array, unread: Array) -> Array:
        """So many forwards of the draft, which reads so many tokens first that were written without it."""
        return self._table_draft_ms(rows, forwards, unread) * median(self._drafting)

    def _table_draft_ms(self, rows: int, forwards: Array, unread: Array) -> Array:
        each = self.table.draft_ms(rows) * (forwards + READING * unread)
        return np.asarray(each + self.table.proposal_ms(rows) * (forwards > 0))

    def observe(self, rows: int, tokens: int, ms: float, drafting: tuple[float, float, float] | None) -> None:
        """A round of so many tokens took ms without its drafting; drafting: forwards, unread tokens and ms."""
        self._round += 1
        if not self.timed:
            return
        size = np.array([float(tokens)])
        table_ms = float(self._as_measured(rows, size)[0])
        # What was expected counts as the first observation, so that one slow round decides nothing.
        before = _held(float(self.verify_ms(rows, size)[0]), table_ms)
        ratio = _held(ms, table_ms)
        self._any.append(ratio)
        of_rows = self._seen.setdefault(rows, {})
        of_rows.setdefault(tokens, deque([(self._round, before)], KEPT)).append((self._round, ratio))
        self._factors[rows] = self._fresh(of_rows)
        if drafting is not None:
            forwards, unread, took = drafting
            expected = self._table_draft_ms(rows, np.array([forwards]), np.array([unread]))
            self._drafting.append(_held(took, float(expected[0])))

    def _fresh(self, seen: dict[int, deque[tuple[int, float]]]) -> tuple[Array, Array]:
        """The sizes seen of late, ascending, and the median factor of each."""
        old = [tokens for tokens, ratios in seen.items() if ratios[-1][0] <= self._round - FRESH]
        for tokens in old:
            del seen[tokens]
        sizes: Sequence[int] = sorted(seen)
        factors = [median(ratio for _, ratio in seen[tokens]) for tokens in sizes]
        return np.array(sizes, np.float64), np.array(factors)

    def _as_measured(self, rows: int, tokens: Array) -> Array:
        """What the table says, read off once for each number of rows: each token up to 32 more, then coarser."""
        if rows not in self._tables:
            further = np.array([*range(33), *range(36, 97, 4), *range(112, 257, 16), 512, 1024], np.float64)
            self._tables[rows] = (
                rows + further,
                np.array([self.table.verify_ms(rows, float(rows + more)) for more in further]),
            )
        return np.interp(tokens, *self._tables[rows])


def _held(measured: float, expected: float) -> float:
    """measured / expected, held within MOST."""
    return min(max(measured / expected, 1 / MOST), MOST) if expected > 0 else 1.0
