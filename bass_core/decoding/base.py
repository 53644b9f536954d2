"""The interface between a lane and its decoder, and the parameters that all decoders of a request share.

Contract: any object with the members of `Decoder` can be a lane's decoder; nothing checks its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..sampling.params import SamplingParams
from ..sequence import Round


class Timeline(Protocol):
    """When draft and target were busy, in a decoder that runs both at the same time."""

    def view(self) -> dict[str, Any]:
        """The timeline as JSON-ready data."""
        ...


class Decoder(Protocol):
    """What a lane steps.

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
        """Free what the decoder holds beyond its own memory, such as AMUSD's draft process."""
        ...


@dataclass
class DecodingParams:
    """How a decoder samples and verifies; the same for every lane of a race. synthetic: `synthetic_acceptance`."""

    sampling: SamplingParams
    seed: int = 0
    verification: str = "chen"
    synthetic: float | None = None
