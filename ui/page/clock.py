"""The clock that a race's settings ask for, this machine's or a predicted one, and what the page says of it.

Contract: only those settings are checked that apply to the chosen clock, so that a number which the form hides is
never refused. What is said is made from a snapshot's "clock", whose key is absent where times are measured; a
recording's may lack any key. Raises RequestError, one sentence that says what to change.
Non-goals: the times (bass_core).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bass_core import PAIRS, Hardware, ModelSize, RequestError, SimulatedClock

MEASURED, OWN = "measured", "own"
# (words, value), as in choices.py.
CLOCKS = (
    ("this machine, measured", MEASURED),
    ("A100, predicted", "a100"),
    ("H100, predicted", "h100"),
    ("H200, predicted", "h200"),
    ("B200, predicted", "b200"),
    ("a laptop's GPU, predicted", "laptop"),
    ("your own numbers, predicted", OWN),
)
# By the target's name in bass_core.
FIRST = "7.8b"
MODELS = (
    ("7.8B with 310M, as in BASS", FIRST),
    ("1.7B with 135M", "1.7b"),
    ("70B with 8B", "70b"),
    ("your own sizes", OWN),
)
# The form asks for no memory: with own numbers nothing is too large.
UNLIMITED_GB = 1e6
# By the setting's name: what the number is, and an example of it.
NUMBERS = {
    "clock_bandwidth": ("The memory bandwidth", "GB/s", "2039 of an A100"),
    "clock_tflops": ("The peak", "TFLOP/s", "312 of an A100"),
    "clock_target": ("The target's size", "billions of parameters", "7.8"),
    "clock_draft": ("The draft's size", "billions of parameters", "0.31"),
    "clock_bytes": ("The size of a weight", "bytes", "2 of bfloat16"),
}


def clock(settings: Mapping[str, Any]) -> SimulatedClock | None:
    """The clock of a race with these settings; None for the measured one.

    Raises RequestError for an unknown name, for a number that applies and is none, and for what does not fit.
    """
    chosen, models = settings.get("clock", MEASURED), settings.get("clock_models", FIRST)
    _known("clock", chosen, CLOCKS)
    if chosen == MEASURED:
        return None
    _known("clock_models", models, MODELS)
    target: str | ModelSize
    draft: str | ModelSize
    if models == OWN:
        each = _number(settings, "clock_bytes")
        target, draft = (
            ModelSize(_number(settings, name) * 1e9, each) for name in ("clock_target", "clock_draft")
        )
    else:
        target, draft = next(
            (name.lower(), smaller.lower()) for name, smaller in PAIRS.items() if name.lower() == models
        )
    return SimulatedClock(_own_hardware(settings) if chosen == OWN else chosen, target, draft)


def code(settings: Mapping[str, Any]) -> str | None:
    """The clock as a Python expression, for the page's snippet. Raises RequestError."""
    made = clock(settings)
    if made is None:
        return None
    return f"SimulatedClock({made.hardware!r}, target={made.target!r}, draft={made.draft!r})"


def _own_hardware(settings: Mapping[str, Any]) -> Hardware:
    bandwidth, tflops = (_number(settings, name) for name in ("clock_bandwidth", "clock_tflops"))
    name = f"machine of {bandwidth:g} GB/s and {tflops:g} TFLOP/s"
    return Hardware(name, bandwidth, tflops * 1e12, memory=UNLIMITED_GB, source="own numbers; any model fits")


def _known(name: str, value: object, choices: tuple[tuple[str, str], ...]) -> None:
    values = [known for _, known in choices]
    if value not in values:
        raise RequestError(f"{name} must be one of {', '.join(values)}; got {value!r}.")


def _number(settings: Mapping[str, Any], name: str) -> float:
    value, (what, unit, example) = settings.get(name), NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RequestError(f"{what} must be a number of {unit} above 0, such as {example}.")
    return float(value)


def clock_of(snapshot: Mapping[str, Any]) -> dict[str, Any] | None:
    """The predicted clock of a snapshot; None if its times are measured."""
    found = snapshot.get("clock")
    return found if isinstance(found, dict) and found else None


def machine_of(clock: Mapping[str, Any], mark: str = "") -> str:
    """The machine's name: "H100 with 7.8B and 310M", or "2 H100 with 70B and 8B"; `mark` is put before "H100"."""
    gpus = clock.get("gpus") or 1
    models = " and ".join(str(clock[key]) for key in ("target", "draft") if clock.get(key))
    name = f"{mark}{clock.get('hardware') or 'machine'}"
    return ("" if gpus == 1 else f"{gpus} ") + name + (f" with {models}" if models else "")


def where(clock: Mapping[str, Any]) -> str:
    """Where lane times hold: "on a predicted H100 with 7.8B and 310M"."""
    article = "a " if (clock.get("gpus") or 1) == 1 else ""
    return f"on {article}{machine_of(clock, 'predicted ')}"


def head(snapshot: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the feed's head says of a predicted clock; nothing of a measured one.

    machine: its name. code: the Python that makes the clock; None for a recording whose settings do not say.
    """
    predicted = clock_of(snapshot)
    if predicted is None:
        return {}
    try:
        expression = code(settings)
    except RequestError:
        expression = None
    return {"clock": predicted, "machine": machine_of(predicted), "code": expression}
