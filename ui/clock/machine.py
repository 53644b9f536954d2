"""The clock that a race's settings ask for: this machine's, or a predicted one.

Contract: `arguments` checks only those settings that apply to the chosen clock, so that a number which the form
hides is never refused. Raises RequestError, one sentence that says what to change. bass_core makes the times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bass_core import RequestError, SimulatedClock

MEASURED, OWN = "measured", "own"
# (words, value), as in ui/page/choices.py.
CLOCKS = (
    ("this machine, measured", MEASURED),
    ("A100, predicted", "a100"),
    ("H100, predicted", "h100"),
    ("H200, predicted", "h200"),
    ("B200, predicted", "b200"),
    ("a laptop's GPU, predicted", "laptop"),
    ("your own numbers, predicted", OWN),
)
SIZES = {"7.8b": ("7.8b", "310m"), "1.7b": ("1.7b", "135m"), "70b": ("70b", "8b")}
MODELS = (
    ("7.8B with 310M, the paper's sizes", "7.8b"),
    ("1.7B with 135M", "1.7b"),
    ("70B with 8B", "70b"),
    ("your own sizes", OWN),
)
# By the setting's name: what the number is, and an example of it.
NUMBERS = {
    "clock_bandwidth": ("The memory bandwidth", "GB/s", "2039 of an A100"),
    "clock_tflops": ("The peak", "TFLOP/s", "312 of an A100"),
    "clock_target": ("The target's size", "billions of parameters", "7.8"),
    "clock_draft": ("The draft's size", "billions of parameters", "0.31"),
    "clock_bytes": ("The size of a weight", "bytes", "2 of bfloat16"),
}


def arguments(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keyword arguments of SimulatedClock for these settings; None for the measured clock.

    Raises RequestError for an unknown name, and for a number that applies and is none.
    """
    clock, models = settings.get("clock", MEASURED), settings.get("clock_models", "7.8b")
    _known("clock", clock, CLOCKS)
    if clock == MEASURED:
        return None
    _known("clock_models", models, MODELS)
    given: dict[str, Any] = {}
    if clock == OWN:
        given |= {"bandwidth": _number(settings, "clock_bandwidth"), "tflops": _number(settings, "clock_tflops")}
    else:
        given["hardware"] = clock
    if models == OWN:
        given |= {name: 1e9 * _number(settings, f"clock_{name}") for name in ("target", "draft")}
        given["bytes_per_weight"] = _number(settings, "clock_bytes")
    else:
        given |= dict(zip(("target", "draft"), SIZES[models], strict=True))
    return given


def clock(settings: Mapping[str, Any]) -> SimulatedClock | None:
    """The clock of a race with these settings; None for the measured one. Raises RequestError."""
    given = arguments(settings)
    return None if given is None else SimulatedClock(**given)


def code(settings: Mapping[str, Any]) -> str | None:
    """The same as a Python expression, for the page's snippet."""
    given = arguments(settings)
    words = ", ".join(f"{name}={value!r}" for name, value in (given or {}).items())
    return None if given is None else f"SimulatedClock({words})"


def _known(name: str, value: object, choices: tuple[tuple[str, str], ...]) -> None:
    values = [known for _, known in choices]
    if value not in values:
        raise RequestError(f"{name} must be one of {', '.join(values)}; got {value!r}.")


def _number(settings: Mapping[str, Any], name: str) -> float:
    value, (what, unit, example) = settings.get(name), NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RequestError(f"{what} must be a number of {unit} above 0, such as {example}.")
    return float(value)
