"""Costs of rounds: a table of measured times (`CostTable`), its file, and its correction (`CorrectedCosts`).

A CostTable gives the milliseconds of a verification, by rows and tokens, and of a forward of the draft. It
interpolates between measured points. Its file is plain JSON; a damaged file counts as missing.

The table knows how the cost grows with the size of a step. But it was measured at another time, with other texts,
and perhaps under load. So CorrectedCosts corrects it with the time of each round: at the round's own size and,
by the same factor, at sizes near it. It uses medians, because a machine hiccups, and only recent rounds, because
a machine changes. Untimed costs (those of a simulated clock) are not corrected. decode/calibrate.py measures the
table.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]


class RoundCosts(Protocol):
    """Milliseconds of a round's parts, measured (CostTable) or predicted (Roofline); see CostTable."""

    @property
    def padded(self) -> bool: ...

    def verify_ms(self, rows: int, tokens: float) -> float: ...

    def draft_ms(self, rows: int) -> float: ...

    def proposal_ms(self, rows: int) -> float: ...


@dataclass(frozen=True)
class CostTable:
    """Measured times in milliseconds. All keys are numbers of rows, in ascending order.

    Attributes:
        verify: for each number of rows a list of (tokens of all rows, ms of a verification).
        draft: ms of one forward of the draft. Empty if the drafter runs no model.
        padded: whether padding costs as much as tokens. `tokens` is then rows x tokens of the widest row.
        proposal: ms of a proposal besides its forwards, for the same rows as `draft`, or empty.
    """

    verify: dict[int, list[Point]]
    draft: dict[int, float]
    padded: bool
    proposal: dict[int, float] = field(default_factory=dict)

    def verify_ms(self, rows: int, tokens: float) -> float:
        """Return the time of a verification of `tokens` in all rows. Extrapolates beyond the last point."""
        return _between([(size, _line(points, tokens)) for size, points in self.verify.items()], rows)

    def draft_ms(self, rows: int) -> float:
        """Return the time of one forward of the draft, or 0 if the drafter runs no model."""
        return _between(list(self.draft.items()), rows) if self.draft else 0.0

    def proposal_ms(self, rows: int) -> float:
        """Return the time of a proposal besides its forwards: catching up, states and call overhead."""
        return _between(list(self.proposal.items()), rows) if self.proposal else 0.0

    @property
    def balance(self) -> float:
        """Tokens of a step for which multiplying takes as long as reading the weights takes; infinite if unknown.

        A token's multiplications take the mean slope of the most rows.
        """
        (few, few_ms), (many, many_ms) = (list(self.verify.values())[-1][at] for at in (0, -1))
        token_ms = (many_ms - few_ms) / (many - few) if many > few else 0.0
        return self.verify_ms(1, 1) / token_ms if token_ms > 0 else math.inf

    def joined(self, other: CostTable) -> CostTable:
        """Return this table plus the entries of `other`, which replace ours for the same number of rows."""
        verify, draft = self.verify | other.verify, self.draft | other.draft
        proposal = self.proposal | other.proposal
        return CostTable(
            dict(sorted(verify.items())),
            dict(sorted(draft.items())),
            other.padded,
            dict(sorted(proposal.items())),
        )


def _line(points: list[Point], at: float) -> float:
    """Interpolate linearly between the points, and extrapolate at both ends."""
    if len(points) == 1:
        return points[0][1]
    index = min(max(bisect_left(points, (at, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _between(points: list[Point], at: float) -> float:
    inside = min(max(at, points[0][0]), points[-1][0])
    return _line(points, inside)


def read_table(path: Path | None) -> CostTable | None:
    """Return the table in the file, or None if the file is missing, damaged or implausible."""
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        verify = {int(rows): [(x, y) for x, y in points] for rows, points in data["verify"].items()}
        draft = {int(rows): ms for rows, ms in data["draft"].items()}
        proposal = {int(rows): ms for rows, ms in data["proposal"].items()}
        table = CostTable(verify, draft, data["padded"], proposal)
        return table if _is_sound(table) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _is_sound(table: CostTable) -> bool:
    """Return whether the table is plausible: finite and ascending, with no zero cost for a verification."""
    lines = list(table.verify.values())
    numbers = [number for points in lines for point in points for number in point]
    numbers += [*table.draft.values(), *table.proposal.values()]
    return (
        bool(lines)
        and isinstance(table.padded, bool)
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and all(points and min(y for _, y in points) > 0 for points in lines)
        and all(_ascends([x for x, _ in points]) for points in lines)
        and all(before[1] <= after[1] for points in lines for before, after in pairwise(points))
        and _ascends([*table.verify])
        and list(table.draft) in ([], list(table.verify))
        and list(table.proposal) in ([], list(table.draft))
        and min([*table.draft.values(), *table.proposal.values()], default=0) >= 0
    )


def _ascends(numbers: list[float]) -> bool:
    """Return whether each number is larger than the one before, and the first larger than 0."""
    return all(low < high for low, high in pairwise([0, *numbers]))


def write_table(path: Path | None, table: CostTable) -> None:
    """Write the table if possible. If the cache can't be written, the next start measures again."""
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

# A size's correction is the median over its last SAMPLES rounds. It is forgotten if the size does not occur again
# within MAX_AGE rounds.
SAMPLES, MAX_AGE = 5, 128
# Limit of a round's correction, in both directions. For example, a round that takes 20 times the table's time is
# treated as if it took 8 times the table's time.
MAX_CORRECTION = 8.0
# Time to read one unread token, as a share of a draft forward. Measured for the shipped head on one core: 0.06 to
# 0.12 ms per token, while a forward takes 0.5 to 0.6 ms. If padding costs as much as tokens, the device is a GPU,
# which reads many tokens in the time of one forward.
READING, PADDED_READING = 1 / 6, 1 / 64


class CorrectedCosts:
    """The milliseconds of a table, corrected by the times of recent rounds.

    Unlike the methods of RoundCosts, `verify_ms` and `draft_ms` take arrays of sizes and return one time per size.
    """

    def __init__(self, table: RoundCosts, timed: bool = True) -> None:
        self.table, self.timed = table, timed
        self._tables: dict[int, tuple[Array, Array]] = {}
        # By rows and tokens: the number of the last such round, measured time / table's time of the last
        # few, and their median.
        self._ratios: dict[int, dict[int, tuple[int, deque[float], float]]] = {}
        self._all_ratios: deque[float] = deque([1.0], SAMPLES)
        self._draft_ratios: deque[float] = deque([1.0], SAMPLES)
        self._factors: dict[int, tuple[Array, Array]] = {}
        self._round = 0

    @property
    def padded(self) -> bool:
        """Whether padding costs as much as tokens."""
        return self.table.padded

    def verify_ms(self, rows: int, tokens: Array) -> Array:
        """Return the time of a verification for each of `tokens` (tokens in all rows, ascending)."""
        ms = self._as_measured(rows, tokens)
        if rows in self._factors:
            ms = ms * np.interp(tokens, *self._factors[rows])
        elif self.timed:
            ms = ms * median(self._all_ratios)
        # A wider step is never cheaper. If the times say otherwise, a narrower step was measured at a bad moment.
        return np.maximum.accumulate(ms)

    def draft_ms(self, rows: int, forwards: Array, unread: Array) -> Array:
        """Return the time to draft: to read `unread` tokens and run `forwards` draft forwards."""
        return self._table_draft_ms(rows, forwards, unread) * median(self._draft_ratios)

    def _table_draft_ms(self, rows: int, forwards: Array, unread: Array) -> Array:
        reading = PADDED_READING if self.padded else READING
        each = self.table.draft_ms(rows) * (forwards + reading * unread)
        return np.asarray(each + self.table.proposal_ms(rows) * (forwards > 0))

    def observe(self, rows: int, tokens: int, ms: float, drafting: tuple[float, float, float] | None) -> None:
        """Learn from the times of a round.

        Args:
            tokens: verified tokens of all rows.
            ms: time of the round without drafting.
            drafting: forwards, unread tokens and ms of its drafting, or None.
        """
        self._round += 1
        if not self.timed:
            return
        size = np.array([float(tokens)])
        table_ms = float(self._as_measured(rows, size)[0])
        # The expected time counts as the first observation, so that one slow round decides nothing.
        before = _clamped_ratio(float(self.verify_ms(rows, size)[0]), table_ms)
        ratio = _clamped_ratio(ms, table_ms)
        self._all_ratios.append(ratio)
        sizes_seen = self._ratios.setdefault(rows, {})
        _, ratios, _ = sizes_seen.get(tokens, (0, deque([before], SAMPLES), before))
        ratios.append(ratio)
        sizes_seen[tokens] = self._round, ratios, median(ratios)
        self._factors[rows] = self._recent_factors(sizes_seen)
        if drafting is not None:
            forwards, unread, draft_ms = drafting
            if unread > 8 * rows:
                return
            expected = self._table_draft_ms(rows, np.array([forwards]), np.array([unread]))
            self._draft_ratios.append(_clamped_ratio(draft_ms, float(expected[0])))

    def _recent_factors(self, seen: dict[int, tuple[int, deque[float], float]]) -> tuple[Array, Array]:
        """Drop sizes not seen for MAX_AGE rounds. Return the other sizes, ascending, and their median ratios."""
        for tokens in [tokens for tokens, (last, _, _) in seen.items() if last <= self._round - MAX_AGE]:
            del seen[tokens]
        sizes = sorted(seen)
        return np.array(sizes, np.float64), np.array([seen[tokens][2] for tokens in sizes])

    def _as_measured(self, rows: int, tokens: Array) -> Array:
        """Return the table's times without corrections.

        For speed, the table is read once per number of rows, at sizes of up to rows + 1024 tokens. Later calls
        interpolate between these times.
        """
        if rows not in self._tables:
            extra_tokens = np.array([*range(33), *range(36, 97, 4), *range(112, 257, 16), 512, 1024], np.float64)
            self._tables[rows] = (
                rows + extra_tokens,
                np.array([self.table.verify_ms(rows, float(rows + more)) for more in extra_tokens]),
            )
        return np.interp(tokens, *self._tables[rows])


def _clamped_ratio(measured: float, expected: float) -> float:
    """Return measured / expected, clamped to [1 / MAX_CORRECTION, MAX_CORRECTION]."""
    return min(max(measured / expected, 1 / MAX_CORRECTION), MAX_CORRECTION) if expected > 0 else 1.0
