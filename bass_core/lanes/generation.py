"""`generate` and `stream`: one method answers one request.

Contract: arguments are checked before anything runs. The same arguments give the same tokens; only text that is
sampled, and not coupled, with draft_length="auto" or "cost-aware" depends on this machine's measured costs too.
`stream` yields one Round per step; `generate` returns the finished sequences and their metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, cast

from ..budget.base import Budget
from ..budget.policies import DraftLengthPolicy
from ..decoding.admission import admit
from ..decoding.budgets import with_costs
from ..decoding.request import DEFAULT_DRAFT_LENGTH, make_request
from ..drafting.base import Drafter
from ..models.pair import ModelPair
from ..prediction.clock import SimulatedClock
from ..sampling.params import SamplingParams
from ..sequence import Round
from .lane import Lane
from .methods import DEFAULT_METHOD, budget_rows, find_method
from .metrics import Metrics, latency
from .setup.arguments import check_method, refuse_unknown
from .setup.warmup import warm_up
from .snapshot import ClockRecord


@dataclass(frozen=True, repr=False)
class GeneratedSequence:
    """The new tokens only, including a final end-of-text token; text is None without a tokenizer.

    times_ms: lane time at which each token came. ptl_ms: per-token latency since the lane's first prefill ended.
    own_ptl_ms: the same since the sequence's own prefill ended. Both are None for fewer than two tokens.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    origins: list[str]
    times_ms: list[float]
    ptl_ms: float | None
    own_ptl_ms: float | None

    def __repr__(self) -> str:
        text = "" if self.text is None else f", {shorten(self.text, 60)!r}"
        return f"GeneratedSequence({len(self.token_ids)} tokens, {self.finish_reason}{text})"


@dataclass(frozen=True, repr=False)
class Generation:
    """What `generate` returns. timeline: when draft and target were busy, for "amusd" only; see docs/amusd.md.

    clock: what all times are predicted for (ClockRecord); None if they were measured.
    """

    method: str
    sequences: list[GeneratedSequence]
    metrics: Metrics
    timeline: dict[str, Any] | None = None
    clock: ClockRecord | None = None

    def __repr__(self) -> str:
        ms = self.metrics.ms_per_token
        pace = "" if ms is None else f", {ms:.1f} ms per token"
        pace += "" if self.clock is None else f", predicted for {self.clock['hardware']}"
        return f"Generation({self.method}, {self.metrics.new_tokens} tokens in {len(self.sequences)} rows{pace})"


def generate(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    method: str = DEFAULT_METHOD,
    n: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    draft_length: str | int | DraftLengthPolicy | Budget = DEFAULT_DRAFT_LENGTH,
    tree: Seq[int] | None = None,
    drafter: str | Drafter = "auto",
    attention: str = "auto",
    verification: str = "auto",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: str | int | Collection[int] | None = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
    inspect: bool = False,
    clock: SimulatedClock | None = None,
    **unknown: Any,
) -> Generation:
    """Answer a prompt (text, token ids, or a list of either) with n sequences.

    method: "regular", "speculative" (one sequence after another), "bass" (all sequences at once), "amusd" (draft
    and target work at the same time), or a registered method. n: number of answers to one prompt. max_new_tokens:
    per sequence. sampling: temperature, top_k and top_p; None is greedy. draft_length: "auto" ("cost-aware" if this
    machine can be measured, else Algorithm 1), "bass" (Algorithm 1), "cost-aware" (one length, by measured round
    costs), a whole number, a policy, or a budget with a length a row. tree: draft trees of this shape instead, the
    children of each draft level by level, as (3, 2, 1), at most 62 drafts; by a draft model or head. drafter: a
    name from DRAFTERS, a drafter object, or "auto" (the pair's default). attention: a name from ATTENTIONS, or
    "auto" (the fastest known on this device). verification: "block" (judges a row's drafts together), "rejection"
    (one by one), "coupled" (every method gives the same text) or "auto" (of the first two, the one that accepts
    most). sequence_ids: keys of each row's sampling noise, 0 to n - 1 by default. eos_token_id: the id or ids that
    end a text, None for no such id, "auto" for the model's own. raw: leave the chat template out. time_budget_ms:
    lane time after which the lane ends. synthetic_acceptance: accept each draft with this probability, whatever it
    is; for benchmarks. inspect: give each row's round its `detail`, worked out off the lane's clock. clock: a
    SimulatedClock, to predict times on another machine where they are else measured on this one. Raises
    RequestError for an unknown or out-of-range argument, or for a request that does not fit the memory.
    """
    lane = _lane(generate, **locals())
    try:
        while not lane.finished:
            lane.step()
    finally:
        lane.end("stopped")
    return finished(lane)


def stream(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    method: str = DEFAULT_METHOD,
    n: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    draft_length: str | int | DraftLengthPolicy | Budget = DEFAULT_DRAFT_LENGTH,
    tree: Seq[int] | None = None,
    drafter: str | Drafter = "auto",
    attention: str = "auto",
    verification: str = "auto",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: str | int | Collection[int] | None = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
    inspect: bool = False,
    clock: SimulatedClock | None = None,
    **unknown: Any,
) -> Iterator[Round]:
    """Yield the rounds of `generate` as they happen; the arguments are the same and are checked at the call."""
    lane = _lane(stream, **locals())

    def rounds() -> Iterator[Round]:
        try:
            while not lane.finished:
                yield lane.step()
        finally:
            lane.end("stopped")

    return rounds()


def finished(lane: Lane) -> Generation:
    """The result of a finished lane."""
    sequences = [
        GeneratedSequence(
            token_ids=sequence.token_ids,
            text=None if text is None else text.text,
            finish_reason=sequence.finish_reason or "stopped",
            origins=sequence.origins,
            times_ms=sequence.times_ms,
            ptl_ms=latency(sequence, lane.counts.first_prefill_ms),
            own_ptl_ms=latency(sequence, sequence.prefilled_ms),
        )
        for sequence, text in zip(lane.sequences, lane.texts, strict=True)
    ]
    timeline = None if lane.timeline is None else lane.timeline.view()
    simulated = lane.request.clock
    record = None if simulated is None else cast(ClockRecord, simulated.record())
    return Generation(lane.method, sequences, lane.metrics(), timeline, record)


def _lane(
    function: Callable[..., Any],
    pair: ModelPair,
    prompt: str | Seq[Any],
    method: str,
    unknown: dict[str, Any],
    **arguments: Any,
) -> Lane:
    """Check the arguments that `function` was called with, and build the lane for them."""
    refuse_unknown(function, unknown)
    found = find_method(method)
    request = make_request(pair, prompt, **arguments)
    check_method(found, pair, request)
    admit(pair, request, [found])
    warm_up(pair, request)
    request = with_costs(pair, request, budget_rows(request, found))
    # Warming up and measuring leave caches idle; admission frees them where the lane needs their memory.
    admit(pair, request, [found])
    return Lane(pair, request, method)
