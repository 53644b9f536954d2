"""A lane's length policy, and the measured round costs that it may need. Both come after admission.

`Measuring` (or `with_costs`) measures costs before any lane's clock runs and puts them into the request.
"cost-aware" measures everything that is missing; "auto" measures one row and the largest batch, in at most
AUTO_SECONDS, and uses Algorithm 1 if costs can't be measured or stored.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from ..draft.registry import choose_drafter
from ..draft.window import WINDOW
from ..length.acceptance import PastDrafts
from ..length.base import LengthPolicy
from ..length.costs import CostTable, RoundCosts, read_table
from ..length.options import AUTO, DraftLength, make_policy, wants_costs
from ..model.attention import choose_backend
from ..model.pair import ModelPair
from ..predict.clock import SimulatedClock
from ..predict.roofline import Roofline
from ..predict.rounds import Acceptance, predict
from ..sample.params import SamplingParams
from .calibrate import MeasuredCosts
from .cost_store import can_keep, costs_path, may_measure, missing_sizes
from .peaks import measure_peaks
from .request import Request

AUTO_SECONDS = 5.0
# "auto" gives up a table for the rest of the process after this many incomplete tries. The first may have had to
# compile.
MAX_ATTEMPTS = 2
TRIALS = 8  # simulated runs of expected_speedup

_attempts: Counter[Path | None] = Counter()
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

    Measures nothing that could not be stored. A CPU's peaks come first, because they take a second at most, then
    rounds with sampling (the page's first race needs them), then greedy ones.
    """
    pair.refresh()  # compiling on another core would disturb the measurements
    yield from measure_peaks(pair.device, pair.dtype)
    kind, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    for temperature in (1.0, 0.0):
        costs = MeasuredCosts(pair, kind, backend, SamplingParams(temperature=temperature))
        if can_keep(costs.path):
            for _ in costs.measure(missing_sizes(costs.table, rows, costs.doubted)):
                yield


def expected_speedup(
    pair: ModelPair,
    acceptance: Seq[float],
    *,
    rows: int,
    draft_length: DraftLength,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    measure_s: float = 0.0,
) -> float | None:
    """Predict BASS's speed-up over regular decoding from the costs that were measured here.

    Args:
        pair: everything that the request leaves out has its default.
        acceptance: for each row, the probability that a draft is accepted if those before it are. With fewer
            entries than rows they repeat.
        rows: the batch size.
        draft_length: as in `generate`.
        temperature: 0 for greedy decoding.
        max_new_tokens: new tokens per row.
        measure_s: measure missing costs, in at most this many seconds, if they can be stored.

    Returns:
        The speed-up, or None if the costs for so many rows are not known.
    """
    kind, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    measured = MeasuredCosts(pair, kind, backend, SamplingParams(temperature=temperature))
    missing = missing_sizes(measured.table, rows, ends=True)
    if missing and measure_s and may_measure() and can_keep(measured.path):
        pair.refresh()
        for _ in measured.measure(missing, measure_s):
            pass
    costs = measured.table
    if costs is None or missing_sizes(costs, rows, ends=True):
        return None
    chances = Acceptance(np.array([[rate] for rate in acceptance]))
    regular, bass = (
        predict(costs, make_policy(length, costs, timed=False), chances, rows, max_new_tokens, trials=TRIALS)
        for length in (0, draft_length)
    )
    return regular.ms_per_token / bass.ms_per_token


def costs_file(pair: ModelPair) -> Path | None:
    """Return the file for the costs of greedy rounds with defaults (stored_costs), or None without a cache folder.

    Its name depends on everything that these costs depend on: pair, device, threads, versions.
    """
    kind, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    return costs_path(pair, kind, backend, SamplingParams(temperature=0.0))


def stored_costs(pair: ModelPair) -> CostTable | None:
    """Return the measured costs of greedy rounds with defaults, or None if none are stored."""
    return read_table(costs_file(pair))


@dataclass(frozen=True)
class Progress:
    """Progress of the measurements.

    Attributes:
        done: the share that is done, from 0 to 1.
        left_ms: estimated wall time until the measurements end; None while nothing is done yet.
    """

    done: float
    left_ms: float | None


class Measuring:
    """Measures the costs that a request needs, and a CPU's peaks. Iterate to the end.

    Each iteration is one step of a decoder, or one of the peaks; there is none if everything is known already.

    Attributes:
        request: its `costs` are set after the iteration; None if no policy needs them, or if "auto" can't measure
            them.
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
        auto = request.draft_length == AUTO
        # The costs of a user's own drafter object are unknown.
        if auto and (request.kind.is_user_object or not may_measure()):
            return
        costs = MeasuredCosts(self.pair, request.kind, request.backend, request.sampling, request.rule)
        yield from self._measure(costs, auto)
        # Don't remember sampled drafts: a later text, drawn with the same random numbers, must not depend on them.
        shared = request.sampling.greedy and request.synthetic_acceptance is None and costs.path is not None
        past_drafts = _past_drafts[costs.path] if shared else None
        self.request = replace(request, costs=costs.table, costs_path=costs.path, past_drafts=past_drafts)
        yield from measure_peaks(self.pair.device, self.pair.dtype)

    def _measure(self, costs: MeasuredCosts, auto: bool) -> Iterator[None]:
        """Measure what is missing. Errors of "auto" are only logged, because the lanes will report them."""
        sizes, path = missing_sizes(costs.table, self.rows, costs.doubted, ends=auto), costs.path
        if not sizes or (auto and (path is None or _attempts[path] >= MAX_ATTEMPTS or not can_keep(path))):
            return
        if not auto or not _attempts[path]:
            _log.warning(
                "Measuring the cost of a round on this machine%s%s.",
                " again, because rounds took less than the stored cost" if costs.doubted else ", once",
                f", in at most {AUTO_SECONDS:g} s; BASS_MEASURE=0 turns this off" if auto else "",
            )
        seconds = AUTO_SECONDS if auto else math.inf
        try:
            yield from self._counted(costs.measure(sizes, seconds), seconds)
        except Exception as error:
            if not auto:
                raise
            _log.warning("The cost of a round could not be measured (%s): %s", type(error).__name__, error)
        if path is not None and missing_sizes(costs.table, self.rows, ends=auto):
            _attempts[path] += 1

    def _counted(self, shares: Iterator[float], seconds: float) -> Iterator[None]:
        """Run these measuring steps, which end after `seconds` at the latest, and keep `progress` up to date."""
        start = time.perf_counter()
        for share in shares:
            spent = time.perf_counter() - start
            done = min(1.0, max(share, spent / seconds))
            self.progress = Progress(done, 1000 * spent * (1 - done) / done if share else None)
            yield
