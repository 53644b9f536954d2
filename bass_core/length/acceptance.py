"""Estimates of how often drafts are accepted, by their source, row and position (`AcceptanceEstimate`).

The estimates start from a first guess and learn from the counts of earlier rounds; older rounds weigh less. They
depend neither on times nor on the drafts of the coming round. cost_aware.py uses them to choose draft lengths.
"""

from __future__ import annotations

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
# times with the rates of all rows. We forget a row once its observations together weigh less than FORGOTTEN,
# because the row has left the batch or has not drafted for a long time.
ROW_PRIOR, FORGOTTEN = 8.0, 0.05
# First guesses. On Spec-Bench, 0.60 of the shipped draft head's greedy drafts and 0.55 of its sampled ones are
# accepted, and more of the drafts that prompt lookup copies after a match of three tokens.
FIRST_RATE, FIRST_COPY_RATE = 0.55, 0.7

Rates = NDArray[np.floating[Any]]
# By source: float64 [2], how many drafts were allowed and not behind a rejected one, and how many accepted.
PastDrafts = dict[str, NDArray[np.float64]]


class SurvivalRate:
    """Estimates how large counts become, for example a row's number of accepted drafts.

    For each i, it estimates the probability that a count reaches i if it has reached i - 1 and is allowed to reach
    i. For example, a row with 4 drafts, of which 2 were accepted, reached 1 and 2 but not 3.
    """

    def __init__(self, limit: int, first: float) -> None:
        self.first = first
        self._tried, self._reached = np.zeros(limit), np.zeros(limit)
        self._cached_rates: Rates | None = None

    @property
    def tried(self) -> float:
        """The total weight of the observations of the first position."""
        return float(self._tried[0])

    def fade(self, memory: float) -> None:
        """Multiply the weight of all observations by `memory`."""
        self._tried *= memory
        self._reached *= memory
        self._cached_rates = None

    def add(self, count: int, allowed: int) -> None:
        """Add an observed count, which was limited to `allowed` (at least 1)."""
        self._tried[: min(count + 1, allowed)] += 1
        self._reached[:count] += 1
        self._cached_rates = None

    def rates(self) -> Rates:
        """Return float64 [limit], the probability to reach each position from the one before it."""
        if self._cached_rates is None:
            rate, rates = self.first, []
            for tried, reached in zip(self._tried.tolist(), self._reached.tolist(), strict=True):
                rate = (reached + PRIOR * rate) / (tried + PRIOR)
                rates.append(rate)
            self._cached_rates = np.array(rates)
        return self._cached_rates

    def row_rates(self, all_rows: SurvivalRate, doubt: float = 0.0) -> Rates:
        """Return one row's rates: those of all rows, corrected by the row's own observations.

        Args:
            all_rows: the observations of all rows, this one included.
            doubt: add this many standard errors of the rates of all rows.
        """
        return np.asarray((self._reached + ROW_PRIOR * all_rows.upper(doubt)) / (self._tried + ROW_PRIOR))

    def upper(self, doubt: float) -> Rates:
        """Return the rates plus `doubt` standard errors, at most 1."""
        rates = self.rates()
        return np.minimum(1.0, rates + doubt * np.sqrt(rates * (1 - rates) / (self._tried + PRIOR + 1)))

    def chances(self) -> Rates:
        """Return float64 [limit], the probabilities that a count is at least 1, 2, ..., if nothing limits it."""
        return np.cumprod(self.rates())


class AcceptanceEstimate:
    """Estimates for one source: how many of the allowed tokens it drafts, and how many of them are accepted."""

    def __init__(self, limit: int, copies: bool, past: NDArray[np.float64] | None = None) -> None:
        self.limit, self.drafted = limit, SurvivalRate(limit, 1.0)
        self.memory = COPY_MEMORY if copies else MEMORY
        self._guess = FIRST_COPY_RATE if copies else FIRST_RATE
        self._past = np.zeros(2) if past is None else past
        self._accepted, self._rows = SurvivalRate(limit, self._past_rate()), dict[int, SurvivalRate]()

    def _past_rate(self) -> float:
        tested, accepted = self._past.tolist()
        return float((accepted + FIRST_WEIGHT * self._guess) / (tested + FIRST_WEIGHT))

    def accepted(self, row: int, doubt: float = 0.0) -> Rates:
        """Return float64 [limit], the probabilities that at least 1, 2, ... of a row's drafts are accepted.

        Args:
            row: the row's id.
            doubt: add this many standard errors to each position's rate.
        """
        seen = self._rows.get(row)
        rates = self._accepted.upper(doubt) if seen is None else seen.row_rates(self._accepted, doubt)
        return np.cumprod(rates)

    def fade(self, memory: float | None = None) -> None:
        """Multiply the weight of all observations by `memory`, or by that of a round that drafts."""
        for survival in (self.drafted, self._accepted, *self._rows.values()):
            survival.fade(self.memory if memory is None else memory)
        for row in [row for row, survival in self._rows.items() if survival.tried < FORGOTTEN]:
            del self._rows[row]

    def add(self, row: int, allowed: int, drafted: int, accepted: int) -> None:
        """Add what one row did in a round: how many drafts it was allowed, drafted and accepted."""
        self.drafted.add(drafted, allowed)
        self._accepted.add(accepted, allowed)
        self._rows.setdefault(row, SurvivalRate(self.limit, self._guess)).add(accepted, allowed)
        self._past += min(accepted + 1, allowed), accepted
        self._past *= min(1.0, MAX_PAST / self._past[0])
        self._accepted.first = self._past_rate()
