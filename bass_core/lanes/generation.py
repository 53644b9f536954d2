"""`generate` and `stream`: one method answering one request.

Contract: arguments are checked before anything runs; the same arguments give the same tokens. `stream` yields
one Round a step, `generate` the finished sequences and their figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from ..decoding.admission import admit
from ..decoding.request import make_request
from ..models.pair import ModelPair
from ..sequence import Round
from .lane import Lane
from .methods import find_method
from .metrics import Metrics, latency


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Generation:
    """What `generate` returns. timeline: method "amusd" alone, when draft and target were busy; see README."""

    method: str
    sequences: list[GeneratedSequence]
    metrics: Metrics
    timeline: dict[str, Any] | None = None


def generate(pair: ModelPair, prompt: str | Seq[Any], *, method: str = "bass", **arguments: Any) -> Generation:
    """Answer a prompt (text, token ids, or a list of either) with n sequences.

    method: "regular", "speculative" (one sequence after another), "bass" (all at once) or "amusd" (draft and
    target at the same time). Keyword arguments, with
    their defaults: n=1, max_new_tokens=64, sampling=SamplingParams(), draft_length="bass" | int | policy,
    drafter="auto" | a name of drafting/registry.py | object, attention="auto", verification="chen" | "coupled",
    seed=0, sequence_ids=None, eos_token_id="auto", raw=False, time_budget_ms=None, synthetic_acceptance=None.
    Raises RequestError for an argument that is out of range or a request that does not fit the memory.
    """
    lane = _lane(pair, prompt, method, arguments)
    while not lane.finished:
        lane.step()
    return finished(lane)


def stream(pair: ModelPair, prompt: str | Seq[Any], *, method: str = "bass", **arguments: Any) -> Iterator[Round]:
    """The rounds of `generate`, as they happen; the arguments are checked at the call."""
    lane = _lane(pair, prompt, method, arguments)

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
            ptl_ms=latency(sequence, lane.first_prefill_ms),
            own_ptl_ms=latency(sequence, sequence.prefilled_ms),
        )
        for sequence, text in zip(lane.sequences, lane.texts, strict=True)
    ]
    timeline = None if lane.timeline is None else lane.timeline.view()
    return Generation(lane.method, sequences, lane.metrics(), timeline)


def _lane(pair: ModelPair, prompt: str | Seq[Any], method: str, arguments: dict[str, Any]) -> Lane:
    found = find_method(method)
    request = make_request(pair, prompt, **arguments)
    if found.check is not None:
        found.check(pair, request)
    admit(pair, request, [found])
    return Lane(pair, request, method)
