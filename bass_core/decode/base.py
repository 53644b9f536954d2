"""The interface between a lane and its decoder, and the parameters that all decoders of a request share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..model.runner import ModelRunner
from ..sample.params import SamplingParams
from ..sequence import Round
from ..verify.rules import AUTOMATIC, Verification


class TimelineView(Protocol):
    """The times at which draft and target were busy, if a decoder runs both at the same time."""

    def view(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a decoder's caches, all allocated before its first step.

    Attributes:
        shared: the target's keys and values of shared prefixes, each prefix counted once.
        own: the target's keys and values of each row, without the shared prefixes.
        draft: the whole cache of the draft.
        copies: bytes of all caches if every row stored a copy of its prefix.
    """

    shared: int
    own: int
    draft: int
    copies: int


def cache_bytes(target: ModelRunner, draft: ModelRunner | None = None) -> CacheBytes:
    """Return the bytes of these runners' caches."""
    runners = [target] if draft is None else [target, draft]
    return CacheBytes(
        shared=target.cache.nbytes - target.cache.buffer.nbytes,
        own=target.cache.buffer.nbytes,
        draft=0 if draft is None else draft.cache.nbytes,
        copies=sum(runner.nbytes_without_sharing for runner in runners),
    )


class Decoder(Protocol):
    """The object that a lane steps; any object with these members will do.

    An optional attribute `cache` is the CacheBytes that the lane shows. Another one, `next_begins`, is the event
    at which the next round's work begins, if the last step gave it to the device before it read its own round;
    None otherwise. A decoder with a timeline keeps working between its steps, until `pause` is called.

    Attributes:
        target_forwards: the target's prefills and rounds so far.
        timeline: None if draft and target do not overlap.
    """

    @property
    def target_forwards(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def timeline(self) -> TimelineView | None:
        return None

    def prepare(self) -> None:
        """Prepare the first rounds (e.g. capture graphs) before the first step, while no clock runs."""
        ...

    def step(self) -> Round:
        """Do one bounded piece of work: a prefill chunk or one round."""
        ...

    def pause(self) -> None:
        """Stop the work that goes on between steps, until the next step."""
        return None

    def close(self) -> None:
        """Free what deleting the decoder would not free, such as the thread of AMUSD's draft."""
        return None


@dataclass
class DecodingParams:
    """How a decoder samples and verifies; the same for every lane of a race.

    Attributes:
        synthetic: `synthetic_acceptance`.
        inspect: whether rounds set `Round.explain`.
        logprobs: whether rows record the log-probabilities of their tokens.
    """

    sampling: SamplingParams
    seed: int = 0
    verification: Verification = AUTOMATIC
    synthetic: float | None = None
    inspect: bool = False
    logprobs: bool = False
