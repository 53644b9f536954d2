"""How tokens are chosen: temperature, top-k and top-p, checked.

Contract: a SamplingParams that exists is valid. Non-goals: penalties and other processors that read the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import RequestError

# The smallest temperature that is sampled with (vLLM's _SAMPLING_EPS); below it decoding is greedy.
COLDEST = 1e-5
# The largest temperature that logits are divided by; above it, float32 could not hold its reciprocal. All logits
# of a model are equally likely there, but for those that are masked.
HOTTEST = 2.0**126


@dataclass(frozen=True)
class SamplingParams:
    """temperature >= 0 (greedy below COLDEST), top_k >= 0 (0 = off), 0 < top_p <= 1; else a RequestError."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not _number(self.temperature) or self.temperature < 0:
            raise RequestError(
                f"temperature must be a number of at least 0 (0 is greedy); got {self.temperature!r}."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number of at least 0 (0 turns it off); got {self.top_k!r}.")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1 (1 turns it off); got {self.top_p!r}.")

    @property
    def divisor(self) -> float:
        """What logits are divided by: the temperature, at most HOTTEST."""
        return min(self.temperature, HOTTEST)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < COLDEST


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
