"""The interface between a lane and its decoder, and the parameters that all decoders of a request share.

Contract: any object with the members of `Decoder` can be a lane's decoder; nothing checks its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..model.runner import ModelRunner
from ..sample.params import SamplingParams
from ..sequence import Round
from ..verify.rules import AUTOMATIC, Verification


class Timeline(Protocol):
    """When draft and target were busy, in a decoder that runs both at the same time."""

    def view(self) -> dict[str, Any]:
        """The timeline as JSON-ready data."""
        ...


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a decoder's caches take, all of them allocated before its first step.

    shared: the target's keys and values that rows share, each prefix once. own: the room of the target's rows for
    their own. draft: the draft's, shared and own. copies: what `shared`, `own` and `draft` together would be if
    every row kept a copy of its prefix.
    """

    shared: int
    own: int
    draft: int
    copies: int


def cache_bytes(target: ModelRunner, draft: ModelRunner | None = None) -> CacheBytes:
    """The bytes of these runners' caches."""
    runners = [target] if draft is None else [target, draft]
    return CacheBytes(
        shared=target.cache.nbytes - target.cache.buffer.nbytes,
        own=target.cache.buffer.nbytes,
        draft=0 if draft is None else draft.cache.nbytes,
        copies=sum(runner.bytes_of_copies for runner in runners),
    )


class Decoder(Protocol):
    """What a lane steps. It may also have an attribute `cache`, CacheBytes for the lane to show.

    `target_forwards`: the target's prefills and rounds so far. `timeline`: None if draft and target do not
    overlap. A decoder with a timeline keeps working between its steps, until `pause`.
    """

    @property
    def target_forwards(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def timeline(self) -> Timeline | None: ...

    def prepare(self) -> None:
        """Before the first step: prepare, off the clock, what the first rounds need (such as graph captures)."""
        ...

    def step(self) -> Round:
        """Do one bounded piece of work: a prefill chunk or one round."""
        ...

    def pause(self) -> None:
        """Stop the work that goes on between steps, until the next step."""
        ...

    def close(self) -> None:
        """Free what the decoder holds beyond its own memory, such as AMUSD's draft."""
        ...


@dataclass
class DecodingParams:
    """How a decoder samples and verifies; the same for every lane of a race.

    synthetic: `synthetic_acceptance`. inspect: whether rounds explain themselves (Round.explain). logprobs:
    whether rows note the log-probabilities of their tokens.
    """

    sampling: SamplingParams
    seed: int = 0
    verification: Verification = AUTOMATIC
    synthetic: float | None = None
    inspect: bool = False
    logprobs: bool = False
