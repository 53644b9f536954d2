"""How often drafts are accepted, by who drafts them, for which row and at which place: what a policy believes.

Contract: counts of the rounds so far, of which older ones weigh less, begun with a first guess. No clock and no
draft of the coming round enters. Non-goal: deciding (cost_aware.py).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The weight of an observation is multiplied by this with every later round in which its source drafts: acceptance
# changes along a text, and of copies at once where a text stops repeating another.
MEMORY, COPY_MEMORY = 0.97, 0.85
# A place starts as if tried PRIOR times, at the rate of the place before it, the first at FIRST_RATE.
PRIOR = 4.0
# A row counts as if tried ROW_PRIOR times at the rates of all rows: one text is easier than another, and what one
# round says of a row is little. A row that has not drafted for long, or has left, is forgotten.
ROW_PRIOR, FORGOTTEN = 8.0, 0.05
# First guesses: the shipped draft head accepts 0.60 of greedy drafts and 0.55 of sampled ones on Spec-Bench;
# prompt lookup more, after matches of three tokens.
FIRST_RATE, FIRST_COPY_RATE = 0.55, 0.7

Rates = NDArray[np.floating[Any]]


class Reach:
    """How often a count reaches place i, given that it reached i - 1, where it might have: a chain of chances."""

    def __init__(self, limit: int, first: float, memory: float = MEMORY) -> None:
        self.first, self.memory = first, memory
        self._tried, self._reached = np.zeros(limit), np.zeros(limit)
        self._known: Rates | None = None

    @property
    def tried(self) -> float:
        """How often it might have reached 1, of which older times weigh less."""
        return float(self._tried[0])

    def fade(self) -> None:
        """A round has passed."""
        self._tried *= self.memory
        self._reached *= self.memory
        self._known = None

    def add(self, count: int, allowed: int) -> None:
        """Note a count that might have been `allowed`, which is above 0."""
        self._tried[: min(count + 1, allowed)] += 1
        self._reached[:count] += 1
        self._known = None

    def rates(self) -> Rates:
        """float64 [limit]: the chance to reach 1, and to reach each further place from the one before it."""
        if self._known is None:
            rate, rates = self.first, []
            for tried, reached in zip(self._tried.tolist(), self._reached.tolist(), strict=True):
                rate = (reached + PRIOR * rate) / (tried + PRIOR)
                rates.append(rate)
            self._known = np.array(rates)
        return self._known

    def rates_beside(self, whole: Reach) -> Rates:
        """The same of one row beside all rows, whose rates it has until it was tried itself."""
        return np.asarray((self._reached + ROW_PRIOR * whole.rates()) / (self._tried + ROW_PRIOR))

    def chances(self) -> Rates:
        """float64 [limit]: the chance of a count of 1 or more, 2 or more, and so on, if so many are allowed."""
        return np.cumprod(self.rates())


class Believed:
    """Of one source of drafts: of those that a row may draft, how many it drafts and how many are accepted."""

    def __init__(self, limit: int, copies: bool) -> None:
        self.drafted = Reach(limit, 1.0)
        first = (FIRST_COPY_RATE, COPY_MEMORY) if copies else (FIRST_RATE, MEMORY)
        self._new = partial(Reach, limit, *first)
        self._accepted, self._rows = self._new(), defaultdict[int, Reach](self._new)

    def accepted(self, row: int) -> Rates:
        """float64 [limit]: the chance that 1, 2, ... are drafted and accepted, if so many are allowed."""
        if row not in self._rows:
            return self._accepted.chances()
        return np.cumprod(self._rows[row].rates_beside(self._accepted))

    def fade(self) -> None:
        """A round has passed in which it drafted."""
        for reach in (self.drafted, self._accepted, *self._rows.values()):
            reach.fade()
        for row in [row for row, reach in self._rows.items() if reach.tried < FORGOTTEN]:
            del self._rows[row]

    def add(self, row: int, allowed: int, drafted: int, accepted: int) -> None:
        """Note one row of that round."""
        self.drafted.add(drafted, allowed)
        self._accepted.add(accepted, allowed)
        self._rows[row].add(accepted, allowed)
