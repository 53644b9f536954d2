"""The operator's upper bounds, and a check for each setting that a person or a script sent.

Each check takes (label, value, limits) and returns the value to use. It raises RequestError with one sentence for
the visitor. bass_core itself refuses requests beyond the model's context or the memory, and unknown
drafters, attention backends and lanes.
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
# MAX_STOPS: the maximum number of stop strings. MAX_STOP: the maximum length of a stop string in characters.
MAX_STOPS, MAX_STOP = 16, 200
# The maximum length of a chat template's variable in characters.
MAX_VARIABLE = 200


@dataclass(frozen=True)
class Limits:
    """The operator's upper bounds.

    Attributes:
        max_batch: rows.
        max_new_tokens: new tokens per row.
        max_prompt: characters of the prompt.
        max_seconds: wall time of a race, in seconds.
    """

    max_batch: int = 32
    max_new_tokens: int = MAX_NEW_TOKENS
    max_prompt: int = MAX_PROMPT
    max_seconds: float = MAX_SECONDS


Check = Callable[[str, object, Limits], Any]


def prompt(label: str, value: object, limits: Limits) -> str:
    """Require a text that is not blank and not longer than the operator allows."""
    if not isinstance(value, str) or not value.strip():
        raise RequestError("The prompt is empty: write one, or pick a preset.")
    if len(value) > limits.max_prompt:
        raise RequestError(
            f"The prompt has {len(value)} characters and this server takes at most {limits.max_prompt}: "
            "shorten it."
        )
    return value


def prompts(label: str, value: object, limits: Limits) -> str:
    """Require "one" (one prompt for all rows) or "lines" (one prompt per line)."""
    if value not in ("one", "lines"):
        raise RequestError('prompts must be "one" (one prompt for all rows) or "lines" (one prompt per line).')
    return str(value)


def lines(text: str, limits: Limits) -> list[str]:
    """Return the prompts of a text that has one per line, without blank lines.

    Raises:
        RequestError: if there are more prompts than the operator allows rows.
    """
    prompts = [line.strip() for line in text.split("\n") if line.strip()]
    if len(prompts) > limits.max_batch:
        raise RequestError(
            f"There are {len(prompts)} prompts, one per line, and this server takes at most {limits.max_batch}: "
            "remove some, or choose one prompt for all rows."
        )
    return prompts


def name(label: str, value: object, limits: Limits) -> str:
    """Accept any name: bass_core refuses unknown ones."""
    return str(value)


def pair(label: str, value: object, limits: Limits) -> str:
    """Require the name of a pair. "" and None, which a script may send, mean the operator's own pair."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_PAIR_NAME:
        raise RequestError(
            f"The pair must be a name of at most {MAX_PAIR_NAME} characters, or empty for the server's own."
        )
    return value.strip()


def whole(low: int, high: Callable[[Limits], int]) -> Check:
    """Return a check for whole numbers from `low` to `high`, both included."""

    def check(label: str, value: object, limits: Limits) -> int:
        number, top = finite(value), high(limits)
        if number is None or not number.is_integer() or not low <= number <= top:
            raise RequestError(f"{label} must be a whole number from {low} to {top}.")
        return int(number)

    return check


def temperature(label: str, value: object, limits: Limits) -> float:
    """Require a number of 0 or more. Return 0.0 if it is small enough to be greedy, so that the page shows 0."""
    number = finite(value)
    if number is None or number < 0:
        raise RequestError("Temperature must be a number of 0 or more; 0 always takes the most likely token.")
    return 0.0 if SamplingParams(number).greedy else number


def top_p(label: str, value: object, limits: Limits) -> float:
    """Require a number above 0 and at most 1."""
    number = finite(value)
    if number is None or not 0 < number <= 1:
        raise RequestError("Top-p must be a number above 0 and at most 1; 1 keeps every token.")
    return number


def min_p(label: str, value: object, limits: Limits) -> float:
    """Require a number from 0 to 1."""
    number = finite(value)
    if number is None or not 0 <= number <= 1:
        raise RequestError("Min-p must be a number from 0 to 1; 0 keeps every token.")
    return number


def penalty(label: str, value: object, limits: Limits) -> float:
    """Require a number from 0.001 to 1000."""
    number = finite(value)
    if number is None or not 0.001 <= number <= 1000:
        raise RequestError(f"{label} must be a number from 0.001 to 1000; 1 means no penalty.")
    return number


def stop(label: str, value: object, limits: Limits) -> tuple[str, ...] | None:
    """Require a text or a list of up to MAX_STOPS texts, none of them empty. None means no stop strings."""
    if value is None:
        return None
    texts: Any = [value] if isinstance(value, str) else value
    is_short_list = isinstance(texts, list | tuple) and len(texts) <= MAX_STOPS
    if not is_short_list or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP for text in texts):
        raise RequestError(
            f"stop must be a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP} characters, or null for none."
        )
    return tuple(texts)


def system(label: str, value: object, limits: Limits) -> str | None:
    """Require a system message, at most as long as a prompt. None and "" mean no system message."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > limits.max_prompt:
        raise RequestError(f"system must be a text of at most {limits.max_prompt} characters, or null for none.")
    return value


def variables(label: str, value: object, limits: Limits) -> dict[str, Any] | None:
    """Require variables of the chat template by name, each a plain value. None means no variables.

    bass_core refuses names that it sets itself.
    """
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or len(str(value)) > limits.max_prompt:
        raise RequestError("chat_template_kwargs must be an object of names and values, or null for none.")
    for key, entry in value.items():
        short = isinstance(entry, str) and len(entry) <= MAX_VARIABLE
        if not (short or isinstance(entry, bool) or finite(entry) is not None):
            raise RequestError(
                f"chat_template_kwargs may contain true, false, numbers and texts of at most {MAX_VARIABLE} "
                f"characters: change or leave out {str(key)[:MAX_VARIABLE]}."
            )
    return value


def draft_length(label: str, value: object, limits: Limits) -> str | int:
    """Accept any policy name, because bass_core checks it. Require a number (or digits) within the limit."""
    if isinstance(value, str) and not value.strip().isdecimal():
        return value
    number = int(value) if isinstance(value, str) and len(value) < 9 else value
    length: int = whole(1, lambda _: MAX_DRAFT_LENGTH)("A fixed draft length", number, limits)
    return length


def time_budget(label: str, value: object, limits: Limits) -> float | None:
    """Require a number of milliseconds above 0, or None for no budget."""
    if value is None:
        return None
    number = finite(value)
    if number is None or number <= 0:
        raise RequestError("The time budget must be a number of milliseconds above 0, or empty for none.")
    return number


def acceptance(label: str, value: object, limits: Limits) -> float | None:
    """Require a number from 0 to 1, or None to test the drafts as usual."""
    if value is None:
        return None
    number = finite(value)
    if number is None or not 0 <= number <= 1:
        raise RequestError("Acceptance must be a number from 0 to 1, or empty to test this run's own drafts.")
    return number


def number(label: str, value: object, limits: Limits) -> float | None:
    """Return a finite number, or None for anything else.

    clock.py refuses None if the chosen clock uses this setting.
    """
    return finite(value)


def lanes(label: str, value: object, limits: Limits) -> tuple[str, ...]:
    """Require one or more names. None, which a script may send, means the page's default lanes."""
    if value is None:
        return DEFAULT_LANES
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("Choose at least one lane.")
    return tuple(str(lane) for lane in value)


def finite(value: object) -> float | None:
    """Return the value as a finite float, or None for anything else, including bool and text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An int that is too large for a float is out of every range here.
    return float(value) if abs(value) < 2**53 and math.isfinite(value) else None
