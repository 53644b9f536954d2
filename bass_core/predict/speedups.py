"""Predicted speed-up over the batch size: the rounds of rounds.py, timed by the roofline of other hardware.

`predict_speedups` runs no model and measures nothing. It returns a prediction and its assumptions as plain,
JSON-ready data. Times are in ms, and a figure that does not apply is None. The same arguments always give the same
figures, and `python -m bench simulate` gives them too. Not predicted: prefills, trees of drafts, and lengths that
differ between rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypedDict

import numpy as np

from ..errors import RequestError
from ..length.costs import RoundCosts
from ..length.options import DraftLength, check_draft_length, make_policy
from .checks import rate, whole
from .clock import SimulatedClock
from .roofline import Roofline
from .rounds import Acceptance, Prediction, play, predict, timed

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS, MAX_TOKENS, MAX_CONTEXT = 1024, 4096, 1 << 20


def predict_speedups(
    clock: SimulatedClock,
    *,
    acceptance: float = 0.8,
    batches: Sequence[int] = BATCHES,
    draft_lengths: Sequence[DraftLength] = ("bass", "auto", 4),
    context: int = 512,
    max_new_tokens: int = 256,
    seed: int = 0,
    trials: int = 4,
) -> SpeedUps:
    """Predict the speed-up of BASS over regular decoding on another machine, for batches and draft lengths.

    Args:
        clock: the machine and the models. If it has no number of GPUs, the fewest that hold the largest batch are
            used.
        acceptance: from 0 to 1, the probability that a draft is accepted if those before it are, the same for all
            drafts (Leviathan et al., arXiv 2211.17192, section 3.1).
        draft_lengths: values of `draft_length` as in `generate`, which use the predicted costs.
        context: cached tokens per row, on average.
        trials: simulated runs, over which each figure is the mean.

    Returns:
        The speed-ups and everything that they depend on.

    Raises:
        RequestError: if a value is out of range.
    """
    if not isinstance(clock, SimulatedClock):
        raise RequestError(f'clock must be a SimulatedClock, for example SimulatedClock("h100"); got {clock!r}.')
    chance = Acceptance.same(rate(acceptance))
    sizes = whole("batches", batches, 1, MAX_ROWS)
    lengths = [check_draft_length(length) for length in draft_lengths]
    (tokens,) = whole("max_new_tokens", [max_new_tokens], 2, MAX_TOKENS)
    whole("trials", [trials], 1, MAX_ROWS)
    whole("context", [context], 0, MAX_CONTEXT)
    clock = fitted(clock, sizes, context)
    costs, points = clock.costs(context), []
    for rows in sizes:
        fitting = fits(costs, rows)
        plain = predict(costs, make_policy(0), chance, rows, tokens, seed, trials=1) if fitting else None
        for length in lengths:
            policy = make_policy(length, costs, timed=False)
            runs = play(policy, chance, rows, tokens, seed, trials) if plain else []
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


def _point(rows: int, length: Any, plain: Prediction | None, runs: list[Prediction]) -> SpeedUp:
    if plain is None:
        all_none = dict.fromkeys(("speedup", "error", "ms_per_token", "regular_ms_per_token", "tokens", "rounds"))
        return SpeedUp(batch=rows, draft_length=length, **all_none)  # type: ignore[typeddict-item, no-any-return]
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


class SpeedUp(TypedDict):
    """One batch size and draft length.

    All figures are None if the models and rows don't fit the memory.

    Attributes:
        speedup: regular_ms_per_token / ms_per_token, both predicted.
        error: the speed-up's relative standard error over the trials, or None for one trial.
        tokens: mean number of tokens that a row writes in a round that drafts.
    """

    batch: int
    draft_length: Any
    speedup: float | None
    error: float | None
    ms_per_token: float | None
    regular_ms_per_token: float | None
    tokens: float | None
    rounds: float | None


class SpeedUps(TypedDict):
    """The points and everything that they are predicted from.

    Attributes:
        clock: see `SimulatedClock.record`.
        ridge_tokens: tokens per step from which multiplying takes longer than reading the weights and one row's
            context, at the assumed shares of the datasheet's figures. None for a table of step times.
    """

    clock: dict[str, Any]
    acceptance: float
    context: int
    max_new_tokens: int
    seed: int
    trials: int
    ridge_tokens: float | None
    points: list[SpeedUp]


def ridge(costs: RoundCosts) -> float | None:
    """Return the ridge: the number of tokens per step from which a target's forward is bound by compute.

    With fewer tokens it is bound by reading the weights and one row's context. None for measured step times.
    Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
    """
    if not isinstance(costs, Roofline):
        return None
    cost, assumed = costs.target.cost, costs.assumed
    read = cost.weight_bytes + costs.context * cost.kv_bytes
    flops = 2 * cost.parameters + costs.context * cost.attention_flops
    bandwidth = assumed.bandwidth * costs.hardware.bandwidth * 1e9
    return (read / bandwidth) / (flops / (assumed.compute * costs.hardware.flops))


def fitted(clock: SimulatedClock, sizes: list[int], context: int) -> SimulatedClock:
    """Return the clock with enough GPUs for the largest batch that fits."""
    for rows in sorted(sizes, reverse=True):
        with suppress(RequestError):
            return clock.fitted(rows, context)
    return clock


def fits(costs: RoundCosts, rows: int) -> bool:
    """Return whether the memory holds that many rows. Always true for measured step times."""
    return not isinstance(costs, Roofline) or costs.fits(rows)
