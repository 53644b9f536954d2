"""Compares the rounds of a lane with the stored costs that its policy used (`CostCheck`).

The policy corrects wrong costs by the times of its own rounds (length/costs.py), but every text begins with the
stored ones. Only costs that are too high are found: a round that takes longer than the stored cost may have run on
a busy machine itself.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from ..length.costs import CostTable
from ..sequence import Round

# The costs of a number of rows are too high if the median of at least MIN_ROUNDS rounds of one size is less than
# this share of its stored time. Right costs can be a little too high, because longer texts were measured.
MIN_ROUNDS, TOO_FAST = 5, 0.75


class CostCheck:
    """Collects the times of a lane's rounds, relative to these costs."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        # By rows and tokens: measured time / stored time of each round.
        self._ratios: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def add(self, round_: Round, ms: float) -> None:
        """Add a round that took `ms` milliseconds, unless its number of rows or tokens was not measured."""
        if round_.draft_ms is None or round_.fed is None:
            return
        counts = round_.fed.counts
        rows, tokens = len(counts), len(counts) * max(counts) if self.costs.padded else sum(counts)
        if rows in self.costs.verify and tokens <= self.costs.verify[rows][-1][0]:
            ratio = (ms - round_.draft_ms) / self.costs.verify_ms(rows, tokens)
            self._ratios[rows, tokens].append(ratio)

    def too_high(self) -> set[int]:
        """Return the numbers of rows whose costs are too high."""
        return {
            rows
            for (rows, _), ratios in self._ratios.items()
            if len(ratios) >= MIN_ROUNDS and median(ratios) < TOO_FAST
        }
