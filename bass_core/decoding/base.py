"""What a lane asks of a decoder, and the choices that every decoder of a request shares.

Contract: whatever has the members of `Decoder` can be a lane; nothing asks which class it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..sampling.params import SamplingParams
from ..sequence import Round


class Timeline(Protocol):
    """When who was busy, of a decoder whose draft works beside its target."""

    def view(self) -> dict[str, Any]:
        """As JSON-ready data."""
        ...


class Decoder(Protocol):
    """What a lane steps.

    `target_forwards`: prefills and rounds of the target so far. `timeline`: None where nothing overlaps. A decoder
    with a timeline works on between its steps, until `pause`.
    """

    @property
    def target_forwards(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def timeline(self) -> Timeline | None: ...

    def prepare(self) -> None:
        """Before the first step: make ready, off the clock, what the first rounds need."""
        ...

    def step(self) -> Round:
        """One bounded piece of work: a prefill chunk, or one round."""
        ...

    def pause(self) -> None:
        """Stop what works on between steps, until the next step."""
        ...

    def close(self) -> None:
        """Free what the decoder holds beyond its own memory."""
        ...


@dataclass
class DecodingParams:
    """How a decoder samples and verifies: the same for every lane of a race."""

    sampling: SamplingParams
    seed: int = 0
    verification: str = "chen"
    synthetic: float | None = None
