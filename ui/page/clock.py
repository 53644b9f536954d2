"""The clock that a race's settings ask for, measured or predicted, and its name on the page.

`clock` checks only the settings that apply to the chosen clock, so a number that the form hides is never refused.
The names come from a snapshot's "clock". That key is absent if times are measured, and in a recording any key of
it may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bass_core import PAIRS, Hardware, ModelSize, RequestError, SimulatedClock

MEASURED, OWN = "measured", "own"
# (label, value), as in choices.py.
CLOCKS = (
    ("this machine, measured", MEASURED),
    ("A100, predicted", "a100"),
    ("H100, predicted", "h100"),
    ("H200, predicted", "h200"),
    ("B200, predicted", "b200"),
    ("a laptop's GPU, predicted", "laptop"),
    ("ZeroGPU, predicted", "zerogpu"),
    ("your own numbers, predicted", OWN),
)
# Values are the targets' names in bass_core's PAIRS, in lower case.
DEFAULT_MODELS = "7.8b"
MODELS = (
    ("7.8B with 310M, as in BASS", DEFAULT_MODELS),
    ("1.7B with 135M", "1.7b"),
    ("70B with 8B", "70b"),
    ("your own sizes", OWN),
)
# The form has no field for the memory, so any model fits on a machine with your own numbers.
UNLIMITED_GB = 1e6
# Setting -> (its name in an error, the unit, an example).
NUMBERS = {
    "clock_bandwidth": ("The memory bandwidth", "GB/s", "2039 for an A100"),
    "clock_tflops": ("The peak", "TFLOP/s", "312 for an A100"),
    "clock_target": ("The target's size", "billions of parameters", "7.8"),
    "clock_draft": ("The draft's size", "billions of parameters", "0.31"),
    "clock_bytes": ("The size of a weight", "bytes", "2 for bfloat16"),
}


def clock(settings: Mapping[str, Any]) -> SimulatedClock | None:
    """Return the predicted clock of a race with these settings, or None for the measured one.

    Raises:
        RequestError: for an unknown clock or model, an invalid number, or models that do not fit the machine.
    """
    chosen, models = settings.get("clock", MEASURED), settings.get("clock_models", DEFAULT_MODELS)
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
    """Return the predicted clock as a Python expression, or None for the measured one; refuses as `clock` does."""
    simulated = clock(settings)
    if simulated is None:
        return None
    return f"SimulatedClock({simulated.hardware!r}, target={simulated.target!r}, draft={simulated.draft!r})"


def _own_hardware(settings: Mapping[str, Any]) -> Hardware:
    bandwidth, tflops = (_number(settings, name) for name in ("clock_bandwidth", "clock_tflops"))
    name = f"machine of {bandwidth:g} GB/s and {tflops:g} TFLOP/s"
    return Hardware(name, bandwidth, tflops * 1e12, memory=UNLIMITED_GB, source="own numbers; any model fits")


def _known(name: str, value: object, choices: tuple[tuple[str, str], ...]) -> None:
    values = [known for _, known in choices]
    if value not in values:
        raise RequestError(f"{name} must be one of {', '.join(values)}; got {value!r}.")


def _number(settings: Mapping[str, Any], name: str) -> float:
    value, (quantity, unit, example) = settings.get(name), NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RequestError(f"{quantity} must be a number of {unit} above 0, such as {example}.")
    return float(value)


def clock_of(snapshot: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the predicted clock of a snapshot, or None if its times are measured."""
    predicted = snapshot.get("clock")
    return predicted if isinstance(predicted, dict) and predicted else None


def machine_of(clock: Mapping[str, Any], mark: str = "") -> str:
    """Return the machine's name, e.g. "2 H100 with 70B and 8B"; `mark` goes before the hardware's name."""
    gpus = clock.get("gpus") or 1
    models = " and ".join(str(clock[key]) for key in ("target", "draft") if clock.get(key))
    name = f"{mark}{clock.get('hardware') or 'machine'}"
    return ("" if gpus == 1 else f"{gpus} ") + name + (f" with {models}" if models else "")


def on_machine(clock: Mapping[str, Any]) -> str:
    """Return the machine of the lane times, e.g. "on a predicted H100 with 7.8B and 310M"."""
    article = "a " if (clock.get("gpus") or 1) == 1 else ""
    return f"on {article}{machine_of(clock, 'predicted ')}"


def head(snapshot: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the clock's entries in the feed's head: none if times are measured.

    Returns:
        "clock": the clock of the snapshot. "machine": its name. "code": a Python expression that makes the clock,
        or None for a recording whose settings lack it.
    """
    predicted = clock_of(snapshot)
    if predicted is None:
        return {}
    try:
        expression = code(settings)
    except RequestError:
        expression = None
    return {"clock": predicted, "machine": machine_of(predicted), "code": expression}
