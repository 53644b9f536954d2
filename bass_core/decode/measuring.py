"""A lane's length policy, and the measured round costs that it may need. Both come after admission.

`Measuring` (or `with_costs`) measures costs before any lane's clock runs and puts them into the request.
`policy_of_request` runs no model. draft_length="cost-aware" measures everything that is missing (half a minute for
a small model on two cores). "auto" measures coarsely, in at most COARSE_SECONDS, and uses Algorithm 1 if costs
can't be measured or stored. Under a simulated clock nothing is measured; the policy uses the clock's
own costs. calibrate.py has the method of measuring.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ..draft.registry import choose_drafter
from ..draft.window import WINDOW
from ..length.acceptance import PastDrafts
from ..length.base import LengthPolicy
from ..length.costs import RoundCosts
from ..length.options import AUTO, make_policy, wants_costs
from ..model.attention import choose_backend
from ..model.pair import ModelPair
from ..predict.clock import SimulatedClock
from ..predict.roofline import Roofline
from ..sample.params import SamplingParams
from .calibrate import COARSE, FULL, MeasuredCosts
from .cost_store import can_keep, may_measure, missing_coarse_sizes, missing_sizes
from .peaks import measure_peaks
from .request import Request

COARSE_SECONDS = 5.0
# A process stops measuring a table coarsely after this many incomplete tries. If the last of these tries ran out
# of time, a file next to the table tells later processes not to try. The page and "cost-aware" ignore this limit.
MAX_COARSE_ATTEMPTS = 2

_attempts: Counter[Path] = Counter()
# This process's greedy drafts so far, for each table of costs. Drafts of the same pair and drafter are likely to
# be accepted as often again.
_past_drafts: defaultdict[Path | None, PastDrafts] = defaultdict(dict)
_log = logging.getLogger(__name__)


def policy_of_request(request: Request) -> LengthPolicy:
    """Return a fresh policy for a decoder. It uses the costs that are stored in the request."""
    return make_policy(request.draft_length, request.costs, request.clock is None, request.past_drafts)


def with_costs(pair: ModelPair, request: Request, rows: int) -> Request:
    """Return the request with its round costs; measures missing ones. Arguments as for Measuring."""
    measuring = Measuring(pair, request, rows)
    for _ in measuring:
        pass
    return measuring.request


def simulated_costs(request: Request, clock: SimulatedClock) -> RoundCosts:
    """Return the round costs on the simulated clock, with half of the new tokens written."""
    lengths = [len(prompt) + request.new_tokens(prompt) / 2 for prompt in request.prompts]
    costs = clock.costs(fmean(lengths))
    if not isinstance(costs, Roofline):
        return costs
    kind = request.kind
    if kind.windows and not kind.runs_model:
        return costs.windowed(WINDOW)
    return costs if kind.runs_model or kind.is_user_object else replace(costs, draft=None)


def measure_ahead(pair: ModelPair, rows: int) -> Iterator[None]:
    """Measure, step by step, the missing and doubted costs for up to `rows` rows, with defaults for the rest.

    Measures nothing that could not be stored. A CPU's peaks come first, because they take a second at most. The
    costs of rounds with sampling follow, because the page's first race needs them, then those of greedy rounds.
    """
    pair.refresh()  # compiling on another core would disturb the measurements
    yield from measure_peaks(pair.device, pair.dtype)
    kind, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    for temperature in (1.0, 0.0):
        costs = MeasuredCosts(pair, kind, backend, SamplingParams(temperature=temperature))
        if can_keep(costs.path):
            for _ in costs.measure(missing_sizes(costs.table, rows, costs.doubted)):
                yield


@dataclass(frozen=True)
class Progress:
    """Progress of the measurements.

    Attributes:
        done: the share that is done, from 0 to 1.
        left_ms: estimated wall time until the measurements end, from the speed so far and the time limit; None
            while nothing is done yet.
    """

    done: float
    left_ms: float | None


class Measuring:
    """Measures the costs that a request needs, and a CPU's peaks. Iterate to the end.

    Each iteration is one step of a decoder, or one of the peaks; there is none if everything is known already.

    Attributes:
        request: the request. Its `costs` are set after the iteration; they stay None if no policy needs them, or
            if "auto" can't measure them.
        rows: rows of the largest batch among the lanes that draft by a policy; 0 if there is none.
        progress: progress of the cost measurements; None before their first step.
    """

    progress: Progress | None = None

    def __init__(self, pair: ModelPair, request: Request, rows: int) -> None:
        self.pair, self.request, self.rows = pair, request, rows

    def __iter__(self) -> Iterator[None]:
        request = self.request
        if not self.rows or not wants_costs(request.draft_length):
            return
        if request.clock is not None:
            self.request = replace(request, costs=simulated_costs(request, request.clock))
            return
        table_key = (request.kind, request.backend, request.sampling, request.rule)
        if request.draft_length != AUTO:
            costs = MeasuredCosts(self.pair, *table_key)
            yield from self._thoroughly(costs)
        # The costs of a user's own drafter object are unknown.
        elif not request.kind.is_user_object and may_measure():
            costs = MeasuredCosts(self.pair, *table_key)
            yield from self._coarsely(costs)
        else:
            return
        # Don't remember sampled drafts: a later text, drawn with the same random numbers, must not depend on them.
        shared = request.sampling.greedy and request.synthetic_acceptance is None and costs.path is not None
        past_drafts = _past_drafts[costs.path] if shared else None
        self.request = replace(request, costs=costs.table, costs_path=costs.path, past_drafts=past_drafts)
        yield from measure_peaks(self.pair.device, self.pair.dtype)

    def _thoroughly(self, costs: MeasuredCosts) -> Iterator[None]:
        if sizes := missing_sizes(costs.table, self.rows, costs.doubted):
            _log.warning("Measuring the cost of a round on this machine, once; this can take a minute.")
            yield from self._counted(costs.measure(sizes, FULL), math.inf)

    def _coarsely(self, costs: MeasuredCosts) -> Iterator[None]:
        """Measure in at most COARSE_SECONDS. Errors are only logged, because the lanes will report them."""
        sizes = missing_coarse_sizes(costs.table, self.rows, costs.doubted)
        path = costs.path
        if not sizes or path is None or _attempts[path] >= MAX_COARSE_ATTEMPTS or not can_keep(path):
            return
        if _too_slow(path).exists():
            return
        if not _attempts[path]:
            _log.warning(
                "Measuring the cost of a round on this machine%s, in at most %g s; BASS_MEASURE=0 turns this off.",
                " again, because rounds took less than the stored cost" if costs.doubted else ", once",
                COARSE_SECONDS,
            )
        try:
            yield from self._counted(costs.measure(sizes, COARSE, COARSE_SECONDS), COARSE_SECONDS)
        except Exception as error:
            _log.warning("The cost of a round could not be measured (%s): %s", type(error).__name__, error)
            _attempts[path] += 1
            return
        if missing_coarse_sizes(costs.table, self.rows):
            _attempts[path] += 1
            if _attempts[path] >= MAX_COARSE_ATTEMPTS:
                _too_slow(path).touch()

    def _counted(self, shares: Iterator[float], seconds: float) -> Iterator[None]:
        """Run these measuring steps, which end after `seconds` at the latest, and keep `progress` up to date."""
        start = time.perf_counter()
        for share in shares:
            spent = time.perf_counter() - start
            done = min(1.0, max(share, spent / seconds))
            self.progress = Progress(done, 1000 * spent * (1 - done) / done if share else None)
            yield


def _too_slow(table: Path) -> Path:
    """Return the file that marks a table whose coarse measurement takes too long."""
    return table.with_suffix(".slow")
