"""A sweep of a machine that is not here: bass_core's prediction, as a sweep that the panel draws.

Contract: no model runs. `predicted` checks what was sent, and says in words what the figures assume. Raises
RequestError, one sentence that says what to change.
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

# (words, value), as in ui/page/choices.py.
MACHINES = tuple((f"{name}'s GPU" if name.islower() else name, name) for name in HARDWARE)
MODELS = tuple((f"{target} with {draft}", target) for target, draft in PAIRS.items())
ACCEPTANCE = 0.8
# Where an acceptance comes from; the page's script says which.
ORIGINS = {
    "given": "as given",
    "sweep": "measured in the last sweep",
    "race": "measured in the last race",
    "assumed": "assumed",
}


def predicted(fixed: object, machine: object, models: object, acceptance: object, origin: object) -> Sweep:
    """The predicted sweep for the panel's values. An empty acceptance is ACCEPTANCE, assumed."""
    length = limits.draft_length("", fixed, Limits())
    rate = _rate(acceptance)
    found = _speedups(str(machine), str(models), ACCEPTANCE if rate is None else rate, length)
    origin = "assumed" if rate is None else str(origin)
    settings: dict[str, Any] = {
        key: value for key, value in found.items() if key not in ("points", "ridge_tokens")
    }
    settings |= {"batches": list(dict.fromkeys(one["batch"] for one in found["points"])), "origin": origin}
    return Sweep(
        kind="predicted",
        done=True,
        settings=settings,
        device=machine_of(found["clock"]),
        lines=lines(default_lengths(length), "predicted"),
        points=[_point(one) for one in found["points"]],
        overall=None,
        ridge=Ridge(tokens=found["ridge_tokens"]),
        progress=None,
    )


def _rate(acceptance: object) -> float | None:
    """The field's text as a number; None if it is empty."""
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
    """Kept, since it takes half a second of a core that may be racing."""
    draft = PAIRS.get(models)
    if draft is None:
        raise RequestError(f"The models must be one of {', '.join(PAIRS)}; got {models!r}.")
    clock = SimulatedClock(machine, models, draft)
    return predict_speedups(clock, acceptance=acceptance, draft_lengths=default_lengths(fixed))


def assumptions(sweep: Sweep) -> list[str]:
    """What the figures assume, a sentence each."""
    used = sweep["settings"]
    assumed, source = used["clock"]["assumptions"], used["clock"]["source"]
    bandwidth, compute = 100 * assumed["bandwidth"], 100 * assumed["compute"]
    acceptance = f"{used['acceptance']:.2f}, {ORIGINS.get(used['origin'], ORIGINS['given'])}"
    return [
        f"Every draft is accepted with chance {acceptance}, given that those before it are.",
        f"A step reaches {bandwidth:.0f} % of the bandwidth and {compute:.0f} % of the FLOP/s in the {source}; "
        f"each layer takes {assumed['layer_us']:g} µs more.",
        f"Weights, keys and values have 16 bits. A row has {used['context']} cached tokens on average and writes "
        f"{used['max_new_tokens']} tokens; reading the prompt is left out.",
        "The automatic length is chosen by the predicted costs. A point is the mean of "
        f"{used['trials']} simulated runs.",
    ]


def _point(one: SpeedUp) -> Point:
    return Point(
        prompt=None,
        batch=one["batch"],
        draft_length=one["draft_length"],
        speedup=one["speedup"],
        error=one["error"],
        against=None if one["speedup"] is None else against(one["speedup"], one["error"] or 0.0),
        ms_per_token=one["ms_per_token"],
        regular_ms_per_token=one["regular_ms_per_token"],
        tokens=one["tokens"],
        acceptance=None,
        rounds=None if one["rounds"] is None else round(one["rounds"]),
    )
