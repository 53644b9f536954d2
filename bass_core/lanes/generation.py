"""`generate` and `stream`: one method answering one request.

Contract: arguments are checked before anything runs; the same arguments give the same tokens. `stream` yields
one Round a step, `generate` the finished sequences and their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from ..budget.policies import DraftLengthPolicy
from ..decoding.admission import admit
from ..decoding.request import DEFAULT_DRAFT_LENGTH, make_request
from ..drafting.base import Drafter
from ..models.pair import ModelPair
from ..sampling.params import SamplingParams
from ..sequence import Round
from .lane import Lane
from .methods import DEFAULT_METHOD, find_method
from .metrics import Metrics, latency
from .setup.arguments import refuse_unknown
from .setup.warmup import warm_up


@dataclass(frozen=True, repr=False)
class GeneratedSequence:
    """New tokens alone, a final end-of-text token included; text is None without a tokenizer.

    times_ms: lane time at which each token came. ptl_ms: per-token latency since the lane's first prefill ended,
    own_ptl_ms: since the sequence's own; None for fewer than two tokens.
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
    """What `generate` returns. timeline: method "amusd" alone, when draft and target were busy; see README."""

    method: str
    sequences: list[GeneratedSequence]
    metrics: Metrics
    timeline: dict[str, Any] | None = None

    def __repr__(self) -> str:
        ms = self.metrics.ms_per_token
        pace = "" if ms is None else f", {ms:.1f} ms per token"
        return f"Generation({self.method}, {self.metrics.new_tokens} tokens in {len(self.sequences)} rows{pace})"


def generate(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    method: str = DEFAULT_METHOD,
    n: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    draft_length: str | int | DraftLengthPolicy = DEFAULT_DRAFT_LENGTH,
    drafter: str | Drafter = "auto",
    attention: str = "auto",
    verification: str = "chen",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: str | int | Collection[int] | None = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
    **unknown: Any,
) -> Generation:
    """Answer a prompt (text, token ids, or a list of either) with n sequences.

    method: "regular", "speculative" (one sequence after another), "bass" (all at once), "amusd" (draft and target
    at the same time), or a registered one. n: how often one prompt is answered. max_new_tokens: of each sequence.
    sampling: temperature, top_k and top_p; None is greedy. draft_length: "bass" (Algorithm 1), "cost-aware", a
    whole number, or a policy object. drafter: a name of DRAFTERS, a drafter object, or "auto", the pair's own.
    attention: a name of ATTENTIONS, or "auto", the fastest known here. verification: "chen" (rejection sampling)
    or "coupled" (every method writes the same text). sequence_ids: which noise a row draws, 0 to n - 1 by default.
    eos_token_id: the id or ids that end a text, None for none, "auto" for the model's own. raw: leave the chat
    template out. time_budget_ms: lane time after which the lane ends. synthetic_acceptance: accept each draft with
    this probability, whatever it is; for benches. Raises RequestError for an argument that is unknown or out of
    range, or a request that does not fit the memory.
    """
    lane = _lane(generate, **locals())
    while not lane.finished:
        lane.step()
    return finished(lane)


def stream(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    method: str = DEFAULT_METHOD,
    n: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    draft_length: str | int | DraftLengthPolicy = DEFAULT_DRAFT_LENGTH,
    drafter: str | Drafter = "auto",
    attention: str = "auto",
    verification: str = "chen",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: str | int | Collection[int] | None = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
    **unknown: Any,
) -> Iterator[Round]:
    """The rounds of `generate`, as they happen; the arguments are the same, and are checked at the call."""
    lane = _lane(stream, **locals())

    def rounds() -> Iterator[Round]:
        while not lane.finished:
            yield lane.step()

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
    return Generation(lane.method, sequences, lane.metrics(), timeline)


def _lane(
    function: Callable[..., Any],
    pair: ModelPair,
    prompt: str | Seq[Any],
    method: str,
    unknown: dict[str, Any],
    **arguments: Any,
) -> Lane:
    """A lane for the arguments of a function as they came in."""
    refuse_unknown(function, unknown)
    found = find_method(method)
    request = make_request(pair, prompt, **arguments)
    if found.check is not None:
        found.check(pair, request)
    admit(pair, request, [found])
    warm_up(pair, request)
    return Lane(pair, request, method)
