"""Estimates of how often drafts are accepted, by their source, row and position (`AcceptanceEstimate`).

The estimates start from a first guess and learn from the counts of earlier rounds; older rounds weigh less. They
depend neither on times nor on the drafts of the coming round. cost_aware.py uses them to choose draft lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# An observation's weight is multiplied by this in every later round in which its source drafts. Acceptance changes
# along a text, and that of copies changes suddenly when a text stops repeating another.
MEMORY, COPY_MEMORY = 0.97, 0.85
# The same for a round in which nothing drafts, so that an old observation does not count for ever.
IDLE_MEMORY = 0.99
# The first position's rate before any observation is that of all drafts so far, those of earlier calls included
# (PastDrafts). They count as at most MAX_PAST tries, next to FIRST_WEIGHT tries with the first guess.
MAX_PAST, FIRST_WEIGHT = 400.0, 8.0
# Before its first observation, a position counts as tried PRIOR times with the rate of the position before it.
PRIOR = 8.0
# Some texts are easier than others, but one round says little about a row. So a new row counts as tried ROW_PRIOR
# times with the rates of all rows.
ROW_PRIOR = 8.0
# First guesses. On Spec-Bench, 0.60 of the shipped draft head's greedy drafts and 0.55 of its sampled ones are
# accepted, and more of the drafts that prompt lookup copies after a match of three tokens.
FIRST_RATE, FIRST_COPY_RATE = 0.55, 0.7

Rates = NDArray[np.floating[Any]]
# By source: float64 [2], how many drafts were allowed and not behind a rejected one, and how many accepted.
PastDrafts = dict[str, NDArray[np.float64]]


Counts = NDArray[np.int64]


class SurvivalRate:
    """Estimates how large counts become, for example a row's number of accepted drafts.

    For each i, it estimates the probability that a count reaches i if it has reached i - 1 and is allowed to reach
    i. For example, a row with 4 drafts, of which 2 were accepted, reached 1 and 2 but not 3.
    """

    def __init__(self, limit: int, first: float) -> None:
        self.first = first
        self._tried, self._reached = np.zeros(limit), np.zeros(limit)
        # Results of `rates`, by `doubt`.
        self._cached_rates: dict[float, Rates] = {}

    def fade(self, memory: float) -> None:
        """Multiply the weight of all observations by `memory`."""
        self._tried *= memory
        self._reached *= memory
        self._cached_rates.clear()

    def add(self, counts: Counts, allowed: Counts) -> None:
        """Add observed counts [n], each limited to allowed[i] (at least 1)."""
        tried, reached = _observations(counts, allowed, len(self._tried))
        self._tried += tried.sum(0)
        self._reached += reached.sum(0)
        self._cached_rates.clear()

    def rates(self, doubt: float = 0.0) -> Rates:
        """Return float64 [limit], the probability to reach each position from the one before it.

        Args:
            doubt: add this many standard errors; the sum is at most 1.
        """
        if doubt not in self._cached_rates:
            self._cached_rates[doubt] = self._upper(doubt) if doubt else self._estimated()
        return self._cached_rates[doubt]

    def _estimated(self) -> Rates:
        rate, rates = self.first, []
        for tried, reached in zip(self._tried.tolist(), self._reached.tolist(), strict=True):
            rate = (reached + PRIOR * rate) / (tried + PRIOR)
            rates.append(rate)
        return np.array(rates)

    def _upper(self, doubt: float) -> Rates:
        rates = self.rates()
        return np.minimum(1.0, rates + doubt * np.sqrt(rates * (1 - rates) / (self._tried + PRIOR + 1)))

    def chances(self) -> Rates:
        """Return float64 [limit], the probabilities that a count is at least 1, 2, ..., if nothing limits it."""
        return np.cumprod(self.rates())


def _observations(counts: Counts, allowed: Counts, limit: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return bool [n, limit] each: which positions these counts [n], limited to `allowed`, tried and reached."""
    places = np.arange(1, limit + 1)
    return places <= np.minimum(counts + 1, allowed)[:, None], places <= counts[:, None]


class AcceptanceEstimate:
    """Estimates for one source: how many of the allowed tokens it drafts, and how many of them are accepted."""

    def __init__(self, limit: int, copies: bool, past: NDArray[np.float64] | None = None) -> None:
        self.limit, self.copies, self.drafted = limit, copies, SurvivalRate(limit, 1.0)
        self.memory = COPY_MEMORY if copies else MEMORY
        self._guess = FIRST_COPY_RATE if copies else FIRST_RATE
        self._past = np.zeros(2) if past is None else past
        self._accepted = SurvivalRate(limit, self._past_rate())
        # Each row's observations, [places, limit]. Place 0 has none, for rows that are not in `_places`.
        self._places: dict[int, int] = {}
        self._tried, self._reached = np.zeros((1, limit)), np.zeros((1, limit))

    def _past_rate(self) -> float:
        tested, accepted = self._past.tolist()
        return float((accepted + FIRST_WEIGHT * self._guess) / (tested + FIRST_WEIGHT))

    def accepted(self, rows: Sequence[int], doubts: Sequence[float] = (0.0,)) -> Rates:
        """Return float64 [doubts, rows, limit], the probabilities that at least 1, 2, ... drafts are accepted.

        Args:
            doubts: numbers of standard errors to add to each position's rate.
        """
        # If only one row has drafted, the rates of all rows hold its observations already. Counting them twice
        # would end a model's drafts after an unlucky start. It lets copies, which fail suddenly, adapt faster.
        once = len(self._places) < 2 and not self.copies
        places = [0 if once else self._places.get(row, 0) for row in rows]
        rates = np.array([self._accepted.rates(doubt) for doubt in doubts])[:, None]
        corrected = (self._reached[places] + ROW_PRIOR * rates) / (self._tried[places] + ROW_PRIOR)
        return np.asarray(corrected.cumprod(-1))

    def fade(self, memory: float | None = None) -> None:
        """Multiply the weight of all observations by `memory`, or by that of a round that drafts."""
        memory = self.memory if memory is None else memory
        self.drafted.fade(memory)
        self._accepted.fade(memory)
        self._tried *= memory
        self._reached *= memory

    def add(self, rows: Sequence[int], allowed: Counts, drafted: Counts, accepted: Counts) -> None:
        """Add what these rows did in a round: how many drafts each was allowed, drafted and accepted."""
        for row in rows:
            self._places.setdefault(row, 1 + len(self._places))
        if new := 1 + len(self._places) - len(self._tried):
            self._tried = np.pad(self._tried, ((0, new), (0, 0)))
            self._reached = np.pad(self._reached, ((0, new), (0, 0)))
        tried, reached = _observations(accepted, allowed, self.limit)
        places = [self._places[row] for row in rows]
        np.add.at(self._tried, places, tried)
        np.add.at(self._reached, places, reached)
        self._accepted.add(accepted, allowed)
        self.drafted.add(drafted, allowed)
        self._past += tried.sum(), accepted.sum()
        self._past *= min(1.0, MAX_PAST / self._past[0])
        self._accepted.first = self._past_rate()
