"""What `predict_speedups` returns, as plain data.

Contract: JSON-ready; times in ms; a figure that does not apply is None. Non-goals: computing the figures.
"""

from __future__ import annotations

from typing import Any, TypedDict


class SpeedUp(TypedDict):
    """One batch and draft length: speedup = regular_ms_per_token / ms_per_token, both predicted; all None where
    the models and `batch` rows don't fit the memory. error: the speed-up's relative standard error over the
    trials, None for one. tokens: written by a row and round that drafts."""

    batch: int
    draft_length: Any
    speedup: float | None
    error: float | None
    ms_per_token: float | None
    regular_ms_per_token: float | None
    tokens: float | None
    rounds: float | None


class SpeedUps(TypedDict):
    """The points, and all that they are predicted from. clock: see `SimulatedClock.record`.

    ridge_tokens: tokens a step from which on multiplying takes longer than reading the weights and one row's
    context, at the assumed shares of the datasheet's figures; None of a table of step times.
    """

    clock: dict[str, Any]
    acceptance: float
    context: int
    max_new_tokens: int
    seed: int
    trials: int
    ridge_tokens: float | None
    points: list[SpeedUp]
