"""The predicted sweep of another machine. No model runs.

`predicted` checks the panel's values and returns the sweep. `assumptions` lists its assumptions.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from bass_core import HARDWARE, PAIRS, RequestError, SimulatedClock, SpeedUp, SpeedUps, predict_speedups
from ui.page import limits
from ui.page.clock import machine_of
from ui.page.limits import Limits

from .figures import Point, Ridge, Sweep, against, lines
from .request import default_lengths

# (label, value), as in ui/page/choices.py.
MACHINES = tuple((f"{name}'s GPU" if name.islower() else name, name) for name in HARDWARE)
MODELS = tuple((f"{target} with {draft}", target) for target, draft in PAIRS.items())
ACCEPTANCE = 0.8
# Origin of the acceptance, chosen by the page's script -> words.
ORIGINS = {
    "given": "as given",
    "sweep": "measured in the last sweep",
    "race": "measured in the last race",
    "assumed": "assumed",
}


def predicted(fixed: object, machine: object, models: object, acceptance: object, origin: object) -> Sweep:
    """Return the predicted sweep for the panel's values. An empty acceptance is assumed to be ACCEPTANCE.

    Raises:
        RequestError: for a value that is not allowed.
    """
    length = limits.draft_length("", fixed, Limits())
    rate = _rate(acceptance)
    speedups = _speedups(str(machine), str(models), ACCEPTANCE if rate is None else rate, length)
    origin = "assumed" if rate is None else str(origin)
    settings: dict[str, Any] = {
        key: value for key, value in speedups.items() if key not in ("points", "ridge_tokens")
    }
    settings |= {"batches": list(dict.fromkeys(point["batch"] for point in speedups["points"])), "origin": origin}
    return Sweep(
        kind="predicted",
        done=True,
        settings=settings,
        device=machine_of(speedups["clock"]),
        lines=lines(default_lengths(length), "predicted"),
        points=[_point(point) for point in speedups["points"]],
        overall=None,
        ridge=Ridge(tokens=speedups["ridge_tokens"]),
        progress=None,
    )


def _rate(acceptance: object) -> float | None:
    """Return the field's text as a number, or None if it is empty."""
    text = str(acceptance or "").strip()
    try:
        rate = float(text) if text else None
    except ValueError:
        rate = math.nan
    if rate is None or 0 <= rate <= 1:
        return rate
    raise RequestError("Acceptance must be a number from 0 to 1, such as 0.8, or empty for the last measured one.")


@lru_cache(64)
def _speedups(machine: str, models: str, acceptance: float, fixed: int | str) -> SpeedUps:
    """Return the speed-ups. Cache them: computing them takes a second or two on a core that may be racing."""
    draft = PAIRS.get(models)
    if draft is None:
        raise RequestError(f"The models must be one of {', '.join(PAIRS)}; got {models!r}.")
    clock = SimulatedClock(machine, models, draft)
    return predict_speedups(clock, acceptance=acceptance, draft_lengths=default_lengths(fixed))


def assumptions(sweep: Sweep) -> list[str]:
    """Return the assumptions behind the figures, as sentences."""
    used = sweep["settings"]
    assumed, source = used["clock"]["assumptions"], used["clock"]["source"]
    bandwidth, compute = 100 * assumed["bandwidth"], 100 * assumed["compute"]
    acceptance = f"{used['acceptance']:.2f}, {ORIGINS.get(used['origin'], ORIGINS['given'])}"
    return [
        f"Every draft is accepted with chance {acceptance}, if those before it are.",
        f"A step reaches {bandwidth:.0f} % of the bandwidth and {compute:.0f} % of the FLOP/s in the {source}; "
        f"each layer adds at least {assumed['layer_us']:g} µs, or takes at least {assumed['eager_layer_us']:g} µs "
        f"without CUDA graphs (ZeroGPU), and the host adds at least {assumed['host_us']:g} µs a round.",
        f"Weights, keys and values have 16 bits. A row has {used['context']} cached tokens on average and writes "
        f"{used['max_new_tokens']} tokens. Reading the prompt is left out.",
        "The automatic draft length uses the predicted costs. A point is the mean of "
        f"{used['trials']} simulated runs.",
    ]


def _point(point: SpeedUp) -> Point:
    return Point(
        prompt=None,
        batch=point["batch"],
        draft_length=point["draft_length"],
        speedup=point["speedup"],
        error=point["error"],
        against=None if point["speedup"] is None else against(point["speedup"], point["error"] or 0.0),
        ms_per_token=point["ms_per_token"],
        regular_ms_per_token=point["regular_ms_per_token"],
        tokens=point["tokens"],
        acceptance=None,
        rounds=None if point["rounds"] is None else round(point["rounds"]),
    )
