"""How a lane comes to its budget: what rounds cost here where it must know, then how much each round may draft.

Contract: both happen after admission. Costs are measured by `Measuring` (or `with_costs`), before any lane's clock
runs, and put into the request; `make_budget` runs no model. draft_length="cost-aware" measures all that is missing
(half a minute for a small model on two cores); "auto" measures coarsely, in COARSE_SECONDS at most, and is
Algorithm 1 where costs can't be measured or kept. Non-goals: how costs are measured (calibrate.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..budget.base import Budget
from ..budget.options import AUTO, make_policy, wants_costs
from ..budget.policies import EqualRows
from ..models.pair import ModelPair
from .calibrate import COARSE, FULL, MeasuredCosts
from .cost_store import can_keep, may_measure, missing_coarse_sizes, missing_sizes
from .request import Request

COARSE_SECONDS = 5.0
# So often a process tries in vain to measure in that time; it then does with what it has.
MOST_ATTEMPTS = 2

_attempts: Counter[Path] = Counter()
_log = logging.getLogger(__name__)


def make_budget(request: Request, rows: int) -> Budget:
    """A fresh budget for a decoder that starts with `rows` rows, of a request that has its costs."""
    return EqualRows(make_policy(request.draft_length, request.costs, rows))


def with_costs(pair: ModelPair, request: Request, rows: int) -> Request:
    """The request with what rounds cost; measures what is missing. Arguments as for Measuring."""
    measuring = Measuring(pair, request, rows)
    for _ in measuring:
        pass
    return measuring.request


class Measuring:
    """Measuring what a request must know of costs: iterate to the end, one step of a decoder at a time.

    rows: of the largest batch among its lanes that draft by a budget, 0 where none does. Afterwards `request` has
    its costs; they stay None where nobody asks for them, or where "auto" can't have them. There is no step where
    everything was known already.
    """

    def __init__(self, pair: ModelPair, request: Request, rows: int) -> None:
        self.pair, self.request, self.rows = pair, request, rows

    def __iter__(self) -> Iterator[None]:
        request = self.request
        if not self.rows or not wants_costs(request.draft_length):
            return
        ways = (request.drafter, request.backend, request.sampling, request.verification)
        if request.draft_length != AUTO:
            costs = MeasuredCosts(self.pair, *ways)
            yield from self._thoroughly(costs)
        # Nobody knows what a user's own drafter costs.
        elif isinstance(request.drafter, str) and may_measure():
            costs = MeasuredCosts(self.pair, *ways)
            yield from self._coarsely(costs)
        else:
            return
        self.request = replace(request, costs=costs.table)

    def _thoroughly(self, costs: MeasuredCosts) -> Iterator[None]:
        if sizes := missing_sizes(costs.table, self.rows):
            _log.warning("Measuring once what a round costs on this machine; this can take a minute.")
            yield from costs.measure(sizes, FULL)

    def _coarsely(self, costs: MeasuredCosts) -> Iterator[None]:
        """Measure in COARSE_SECONDS. What goes wrong here is the lanes' to tell: they run the same models."""
        sizes = missing_coarse_sizes(costs.table, self.rows)
        path = costs.path
        if not sizes or path is None or _attempts[path] >= MOST_ATTEMPTS or not can_keep(path):
            return
        _log.warning(
            "Measuring once what a round costs on this machine, in at most %g s; BASS_MEASURE=0 leaves it out.",
            COARSE_SECONDS,
        )
        try:
            yield from costs.measure(sizes, COARSE, COARSE_SECONDS)
        except Exception as error:
            _log.warning("What a round costs could not be measured (%s): %s", type(error).__name__, error)
        if missing_coarse_sizes(costs.table, self.rows):
            _attempts[path] += 1
