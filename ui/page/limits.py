"""The operator's upper bounds, and the checks of what a person or a script sent.

Contract: each check takes (label, value, limits) and returns the value to use, or raises RequestError with one
sentence that says what to change. bass_core refuses what exceeds the model's context or the memory, and unknown
names of drafters, backends and lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bass_core import DEFAULT_LANES, RequestError, SamplingParams

MAX_NEW_TOKENS = 1024
MAX_PROMPT = 20_000
MAX_SECONDS = 600.0
MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**20
MAX_DRAFT_LENGTH = 16
MAX_PAIR_NAME = 200
# Strings that end a text, and characters of one.
MAX_STOPS, MAX_STOP = 16, 200
# Characters of a chat template's variable.
MAX_VARIABLE = 200


@dataclass(frozen=True)
class Limits:
    """The operator's upper bounds: rows, tokens a row, characters of a prompt, seconds of a race (wall time)."""

    max_batch: int = 32
    max_new_tokens: int = MAX_NEW_TOKENS
    max_prompt: int = MAX_PROMPT
    max_seconds: float = MAX_SECONDS


Check = Callable[[str, object, Limits], Any]


def prompt(label: str, value: object, limits: Limits) -> str:
    """A text that is not blank and not longer than the operator allows."""
    if not isinstance(value, str) or not value.strip():
        raise RequestError("The prompt is empty: write one, or pick a preset.")
    if len(value) > limits.max_prompt:
        raise RequestError(
            f"The prompt has {len(value)} characters and this server takes at most {limits.max_prompt}: "
            "shorten it."
        )
    return value


def prompts(label: str, value: object, limits: Limits) -> str:
    """ "one", one prompt for all rows, or "lines", one prompt a line."""
    if value not in ("one", "lines"):
        raise RequestError('prompts must be "one", one prompt for all rows, or "lines", one prompt a line.')
    return str(value)


def lines(text: str, limits: Limits) -> list[str]:
    """The prompts of a text with one a line, blank lines left out. Raises RequestError for too many."""
    found = [line.strip() for line in text.split("\n") if line.strip()]
    if len(found) > limits.max_batch:
        raise RequestError(
            f"There are {len(found)} prompts, one a line, and this server takes at most {limits.max_batch}: "
            "remove some, or choose one prompt for all rows."
        )
    return found


def name(label: str, value: object, limits: Limits) -> str:
    """The name unchanged: bass_core refuses unknown ones."""
    return str(value)


def pair(label: str, value: object, limits: Limits) -> str:
    """A pair's name; "" and None, which a script may send, stand for the operator's own pair."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_PAIR_NAME:
        raise RequestError(
            f"The pair must be a name of at most {MAX_PAIR_NAME} characters, or empty for the server's own."
        )
    return value.strip()


def whole(low: int, high: Callable[[Limits], int]) -> Check:
    """A check for whole numbers from `low` to `high`, both included."""

    def check(label: str, value: object, limits: Limits) -> int:
        number, top = finite(value), high(limits)
        if number is None or not number.is_integer() or not low <= number <= top:
            raise RequestError(f"{label} must be a whole number from {low} to {top}.")
        return int(number)

    return check


def temperature(label: str, value: object, limits: Limits) -> float:
    """A number of 0 or more; 0.0 if it is so small that sampling is greedy, so that the page says so too."""
    number = finite(value)
    if number is None or number < 0:
        raise RequestError("Temperature must be a number of 0 or more; 0 always takes the likeliest token.")
    return 0.0 if SamplingParams(number).greedy else number


def top_p(label: str, value: object, limits: Limits) -> float:
    """A number above 0 and at most 1."""
    number = finite(value)
    if number is None or not 0 < number <= 1:
        raise RequestError("Top-p must be a number above 0 and at most 1; 1 keeps every token.")
    return number


def min_p(label: str, value: object, limits: Limits) -> float:
    """A number from 0 to 1."""
    number = finite(value)
    if number is None or not 0 <= number <= 1:
        raise RequestError("Min-p must be a number from 0 to 1; 0 keeps every token.")
    return number


def penalty(label: str, value: object, limits: Limits) -> float:
    """A number from 0.001 to 1000."""
    number = finite(value)
    if number is None or not 0.001 <= number <= 1000:
        raise RequestError(f"{label} must be a number from 0.001 to 1000; 1 is none.")
    return number


def stop(label: str, value: object, limits: Limits) -> tuple[str, ...] | None:
    """One text or up to MAX_STOPS, none empty; None for none."""
    if value is None:
        return None
    given: Any = [value] if isinstance(value, str) else value
    right = isinstance(given, list | tuple) and len(given) <= MAX_STOPS
    if not right or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in given):
        raise RequestError(
            f"stop must be a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP} characters, or null for none."
        )
    return tuple(given)


def system(label: str, value: object, limits: Limits) -> str | None:
    """A system message, which may be as long as a prompt; None for none."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > limits.max_prompt:
        raise RequestError(f"system must be a text of at most {limits.max_prompt} characters, or null for none.")
    return value


def variables(label: str, value: object, limits: Limits) -> dict[str, Any] | None:
    """The chat template's variables by name, each a plain value; None for none. bass_core refuses templates."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or len(str(value)) > limits.max_prompt:
        raise RequestError("chat_template_kwargs must be an object of names and values, or null for none.")
    for one, said in value.items():
        short = isinstance(said, str) and len(said) <= MAX_VARIABLE
        if not (short or isinstance(said, bool) or finite(said) is not None):
            raise RequestError(
                f"chat_template_kwargs may hold true, false, numbers and texts of at most {MAX_VARIABLE} "
                f"characters: change or leave out {str(one)[:MAX_VARIABLE]}."
            )
    return value


def draft_length(label: str, value: object, limits: Limits) -> str | int:
    """A policy's name unchanged, for bass_core to check, or a number within the limit, which may be text."""
    if isinstance(value, str) and not value.strip().isdecimal():
        return value
    number = int(value) if isinstance(value, str) and len(value) < 9 else value
    length: int = whole(1, lambda _: MAX_DRAFT_LENGTH)("A fixed draft length", number, limits)
    return length


def time_budget(label: str, value: object, limits: Limits) -> float | None:
    """Milliseconds above 0, or None for no budget."""
    if value is None:
        return None
    number = finite(value)
    if number is None or number <= 0:
        raise RequestError("The time budget must be a number of milliseconds above 0, or empty for none.")
    return number


def acceptance(label: str, value: object, limits: Limits) -> float | None:
    """A number from 0 to 1, or None for the drafts' own tests."""
    if value is None:
        return None
    number = finite(value)
    if number is None or not 0 <= number <= 1:
        raise RequestError("Acceptance must be a number from 0 to 1, or empty for this run's own drafts.")
    return number


def number(label: str, value: object, limits: Limits) -> float | None:
    """A finite number, or None: clock.py refuses it where it applies."""
    return finite(value)


def lanes(label: str, value: object, limits: Limits) -> tuple[str, ...]:
    """One or more names; None, which a script may send, stands for the page's default lanes."""
    if value is None:
        return DEFAULT_LANES
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("Choose at least one lane.")
    return tuple(str(one) for one in value)


def finite(value: object) -> float | None:
    """The value as a finite float; None for anything else, bool and text included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An int that is too large for a float is out of every range here.
    return float(value) if abs(value) < 2**53 and math.isfinite(value) else None
