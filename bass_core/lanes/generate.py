"""`generate` and `stream`: answer one request with one method.

`stream` yields one Round per step; `generate` returns the finished sequences and their metrics. Both check their
arguments before anything runs.

The same arguments give the same tokens, with one exception: text that is sampled and not coupled also depends on
this machine's measured costs if draft_length is "auto" or "cost-aware", and on timing if method is "amusd".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any, cast

from typing_extensions import Unpack

from ..decode.admission import admit, make_room
from ..decode.measuring import with_costs
from ..decode.request import make_request
from ..machine.torch_state import torch_defaults
from ..model.pair import ModelPair
from ..options import Keywords, Options, Prompt, lists_options, options_of_call
from ..sequence import Round
from .lane import Lane
from .methods import DEFAULT_METHOD, check_method, find_method, policy_rows
from .metrics import Metrics, latency
from .snapshot import ClockRecord
from .warmup import warm_up


@dataclass(frozen=True, repr=False)
class GeneratedSequence:
    """The new tokens of one sequence.

    Attributes:
        token_ids: the tokens, including a final end-of-text token.
        text: their text, or None without a tokenizer.
        finish_reason: "eos", "stop" (a stop string), "grammar" (its grammar is complete), "length", "budget" (its
            time), "stopped" or "error".
        origins: how each token came about, for example "accepted" or "bonus".
        times_ms: lane time at which each token was written.
        ptl_ms: per-token latency since the lane's first prefill ended, or None for fewer than two tokens.
        own_ptl_ms: the same since the sequence's own prefill ended.
        logprobs: log-probability of each token under the target's plain softmax, or None unless requested.
        sampled_logprobs: the same under the distribution that is sampled.
        complete: whether the text fits its grammar as a whole. A text that ended by "length", for example, may be
            incomplete JSON. None without a grammar.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    origins: list[str]
    times_ms: list[float]
    ptl_ms: float | None
    own_ptl_ms: float | None
    logprobs: list[float] | None = None
    sampled_logprobs: list[float] | None = None
    complete: bool | None = None

    def __repr__(self) -> str:
        text = "" if self.text is None else f", {shorten(self.text, 60)!r}"
        incomplete = ", incomplete" if self.complete is False else ""
        return f"GeneratedSequence({len(self.token_ids)} tokens, {self.finish_reason}{incomplete}{text})"


@dataclass(frozen=True, repr=False)
class Generation:
    """The result of `generate`.

    Attributes:
        timeline: when draft and target were busy, only for "amusd"; see docs/amusd.md.
        clock: the hardware that all times are predicted for (ClockRecord), or None if they were measured.
        copies: the deep copies of your drafter and your draft_length object that this call worked on, in this
            order, with their state at the end; "speculative" has them for one sequence after another. A pickled
            result leaves them out.
    """

    method: str
    sequences: list[GeneratedSequence]
    metrics: Metrics
    timeline: dict[str, Any] | None = None
    clock: ClockRecord | None = None
    copies: list[Any] = field(default_factory=list, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": []}

    def __repr__(self) -> str:
        ms = self.metrics.ms_per_token
        pace = "" if ms is None else f", {ms:.1f} ms per token"
        pace += "" if self.clock is None else f", predicted for {self.clock['hardware']}"
        return f"Generation({self.method}, {self.metrics.new_tokens} tokens in {len(self.sequences)} rows{pace})"


@lists_options
def generate(
    pair: ModelPair,
    prompt: Prompt,
    *,
    method: str = DEFAULT_METHOD,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Generation:
    """Answer a prompt with n sequences.

    Args:
        prompt: text, token ids, or a list of either.
        method: "regular", "speculative" (one sequence after another), "bass" (all sequences at once), "amusd"
            (draft and target work at the same time), or a registered method.
        options: the other arguments as one object, instead of keywords.
        **keywords: the fields of Options, see help(Options).

    Returns:
        The finished sequences and their metrics.

    Raises:
        RequestError: if an argument is unknown or out of range, or the request does not fit the memory.
    """
    lane = _lane(pair, prompt, method, options_of_call(generate, options, keywords), copies=[])
    try:
        while not lane.finished:
            lane.step()
    finally:
        lane.end("stopped")
    return finished(lane)


@lists_options
def stream(
    pair: ModelPair,
    prompt: Prompt,
    *,
    method: str = DEFAULT_METHOD,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Iterator[Round]:
    """Yield the rounds of `generate` as they happen. Takes the same arguments and checks them at the call."""
    lane = _lane(pair, prompt, method, options_of_call(stream, options, keywords))

    def rounds() -> Iterator[Round]:
        try:
            while not lane.finished:
                yield lane.step()
        finally:
            lane.end("stopped")

    return rounds()


def finished(lane: Lane) -> Generation:
    """Return the result of a finished lane."""
    sequences = [
        GeneratedSequence(
            token_ids=sequence.token_ids,
            text=None if text is None else text.text,
            finish_reason=sequence.finish_reason or "stopped",
            origins=sequence.origins,
            times_ms=sequence.times_ms,
            ptl_ms=latency(sequence, lane.counts.first_prefill_ms),
            own_ptl_ms=latency(sequence, sequence.prefilled_ms),
            logprobs=sequence.logprobs if lane.request.logprobs else None,
            sampled_logprobs=sequence.sampled_logprobs if lane.request.logprobs else None,
            complete=None if sequence.grammar is None else sequence.grammar.complete,
        )
        for sequence, text in zip(lane.sequences, lane.texts, strict=True)
    ]
    timeline = None if lane.timeline is None else lane.timeline.view()
    simulated = lane.request.clock
    record = None if simulated is None else cast(ClockRecord, simulated.record())
    return Generation(lane.method, sequences, lane.metrics(), timeline, record, lane.request.copies or [])


@torch_defaults()
def _lane(pair: ModelPair, prompt: Prompt, method: str, options: Options, copies: list[Any] | None = None) -> Lane:
    """Check the arguments of a call and build its lane. `copies` as in Request."""
    method_entry = find_method(method)
    request = make_request(pair, prompt, options=options)
    check_method(method_entry, pair, request)
    needed = admit(pair, request, [method_entry])
    warm_up(pair, request)
    request = with_costs(pair, request, policy_rows(request, method_entry))
    make_room(pair, needed)  # warming up and measuring leave idle caches
    return Lane(pair, replace(request, copies=copies), method)
