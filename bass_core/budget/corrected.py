"""Costs of rounds as the table has them, corrected by what rounds really take.

Contract: a table (cost_table.py) knows the shape: what a wider step costs beside a narrower one. It was measured
at another time, with other texts, perhaps under load. So each round's own time corrects it, where it was seen and,
by the same factor, around there. Medians, because a machine hiccups; only rounds of late, because a machine
changes. Untimed (a simulated clock's costs are what its rounds take), the table counts as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cost_table import RoundCosts

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
        each = self.table.draft_ms(rows) * median(self._drafting)
        return each * (forwards + READING * unread)

    def observe(self, rows: int, tokens: int, ms: float, drafting: tuple[float, float, float] | None) -> None:
        """A round of so many tokens took ms without its drafting; drafting: forwards, unread tokens and ms."""
        self._round += 1
        if not self.timed:
            return
        ratio = _held(ms, float(self._as_measured(rows, np.array([float(tokens)]))[0]))
        self._any.append(ratio)
        of_rows = self._seen.setdefault(rows, {})
        of_rows.setdefault(tokens, deque(maxlen=KEPT)).append((self._round, ratio))
        self._factors[rows] = self._fresh(of_rows)
        if drafting is not None:
            forwards, unread, took = drafting
            self._drafting.append(_held(took, self.table.draft_ms(rows) * (forwards + READING * unread)))

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
