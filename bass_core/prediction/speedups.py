"""Predicted speed-up over the batch: the rounds of rounds.py, timed by the roofline of other hardware.

Contract: `predict_speedups` runs no model and measures nothing; all that it returns is a prediction, as plain
data that names its assumptions. The same arguments give the same figures, which are those of `python -m bench
simulate`. Non-goals: prefills, trees of drafts; policies that plan trees are played as the chains that they
fall back to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypedDict

import numpy as np

from ..budget.cost_table import RoundCosts
from ..budget.options import check_draft_length, make_policy
from ..budget.policies import FixedLength
from ..errors import RequestError
from .clock import SimulatedClock
from .roofline import Roofline
from .rounds import Acceptance, Prediction, play, predict, timed

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_ROWS, MOST_TOKENS, MOST_CONTEXT = 1024, 4096, 1 << 20


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


def predict_speedups(
    clock: SimulatedClock,
    *,
    acceptance: float = 0.8,
    batches: Sequence[int] = BATCHES,
    draft_lengths: Sequence[Any] = ("bass", "auto", 4),
    context: int = 512,
    max_new_tokens: int = 256,
    seed: int = 0,
    trials: int = 4,
) -> SpeedUps:
    """Predict the speed-up of BASS over regular decoding on another machine, for batches and draft lengths.

    clock: the machine and the models; of its GPUs the fewest that hold the largest batch, unless it says how many.
    acceptance: the chance that a draft stands, given that those before it do, the same for all (Leviathan et al.,
    arXiv 2211.17192, section 3.1); from 0 to 1. draft_lengths: as `draft_length` of `generate`, by the predicted
    costs. context: cached tokens a row, on average. max_new_tokens: of each row. seed, trials: of the simulated
    rounds; a figure is the mean over the trials. Times in ms. Raises RequestError for a value out of range.
    """
    if not isinstance(clock, SimulatedClock):
        raise RequestError(f'clock must be a SimulatedClock, as SimulatedClock("h100"); got {clock!r}.')
    rate = _rate(acceptance)
    sizes = _whole("batches", batches, 1, MOST_ROWS)
    lengths = [check_draft_length(length) for length in draft_lengths]
    (tokens,) = _whole("max_new_tokens", [max_new_tokens], 2, MOST_TOKENS)
    _whole("trials", [trials], 1, MOST_ROWS)
    _whole("context", [context], 0, MOST_CONTEXT)
    clock = _fitted(clock, sizes, context)
    costs, points = clock.costs(context), []
    for rows in sizes:
        plain = predict(costs, FixedLength(0), rate, rows, tokens, seed, trials=1) if _fits(costs, rows) else None
        for length in lengths:
            policy = make_policy(length, costs, rows)
            runs = play(policy, rate, rows, tokens, seed, trials) if plain else []
            points.append(_point(rows, length, plain, [timed(costs, [run], tokens) for run in runs]))
    return SpeedUps(
        clock=clock.record(),
        acceptance=float(acceptance),
        context=context,
        max_new_tokens=tokens,
        seed=seed,
        trials=trials,
        ridge_tokens=ridge(costs),
        points=points,
    )


def ridge(costs: RoundCosts) -> float | None:
    """Tokens a step from which on a forward of the target multiplies longer than it reads, with one row's context.

    None of measured step times. Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
    """
    if not isinstance(costs, Roofline):
        return None
    cost, assumed = costs.target.cost, costs.assumed
    read = cost.weight_bytes + costs.context * cost.kv_bytes
    flops = 2 * cost.parameters + costs.context * cost.attention_flops
    bandwidth = assumed.bandwidth * costs.hardware.bandwidth * 1e9
    return (read / bandwidth) / (flops / (assumed.compute * costs.hardware.flops))


def _fitted(clock: SimulatedClock, sizes: list[int], context: int) -> SimulatedClock:
    """The clock with as many GPUs as hold the largest of the batches that fit."""
    for rows in sorted(sizes, reverse=True):
        with suppress(RequestError):
            return clock.fitted(rows, context)
    return clock


def _fits(costs: RoundCosts, rows: int) -> bool:
    """Whether the memory holds so many rows; measured step times are of what fitted."""
    return not isinstance(costs, Roofline) or costs.fits(rows)


def _point(rows: int, length: Any, plain: Prediction | None, runs: list[Prediction]) -> SpeedUp:
    if plain is None:
        nothing = dict.fromkeys(("speedup", "error", "ms_per_token", "regular_ms_per_token", "tokens", "rounds"))
        return SpeedUp(batch=rows, draft_length=length, **nothing)  # type: ignore[typeddict-item]
    times = np.array([run.ms_per_token for run in runs])
    mean = float(times.mean())
    return SpeedUp(
        batch=rows,
        draft_length=length,
        speedup=plain.ms_per_token / mean,
        error=float(times.std(ddof=1)) / math.sqrt(len(runs)) / mean if len(runs) > 1 else None,
        ms_per_token=mean,
        regular_ms_per_token=plain.ms_per_token,
        tokens=float(np.mean([run.mean_acceptance_length for run in runs])),
        rounds=float(np.mean([run.rounds for run in runs])),
    )


def _rate(acceptance: object) -> Acceptance:
    known = isinstance(acceptance, int | float) and not isinstance(acceptance, bool) and math.isfinite(acceptance)
    if not known or not 0 <= float(acceptance) <= 1:  # type: ignore[arg-type]
        raise RequestError(f"acceptance must be a number from 0 to 1; got {acceptance!r}.")
    return Acceptance.same(float(acceptance))  # type: ignore[arg-type]


def _whole(what: str, values: Sequence[int], low: int, high: int) -> list[int]:
    """The values, which must be whole numbers within these bounds, at least one."""
    if not values or not all(type(one) is int and low <= one <= high for one in values):
        raise RequestError(f"{what} must be whole numbers from {low} to {high}; got {values!r}.")
    return list(values)
