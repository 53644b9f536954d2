"""Contract: turns what a person or a script sent into a checked RaceRequest, or raises RequestError.

The limits here belong to the page; what the model or the memory can't hold is refused by bass_core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bass_core import RequestError

MAX_NEW_TOKENS = 1024
MAX_PROMPT = 20_000
MAX_SECONDS = 600.0
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class RaceRequest:
    """One race as the page may ask for it; plain data, so that it can be pickled. `pair` "" is the operator's."""

    prompt: str
    batch_size: int
    max_new_tokens: int
    temperature: float
    seed: int
    pair: str = ""


@dataclass(frozen=True)
class Limits:
    """The operator's upper bounds: rows, tokens a row, characters of a prompt, seconds of a race (wall time)."""

    max_batch: int = 32
    max_new_tokens: int = MAX_NEW_TOKENS
    max_prompt: int = MAX_PROMPT
    max_seconds: float = MAX_SECONDS

    def check(
        self,
        prompt: object,
        batch_size: object,
        max_new_tokens: object,
        temperature: object,
        seed: object,
        pair: object = "",
    ) -> RaceRequest:
        """Return the request; raises RequestError, one sentence that says what to change."""
        return RaceRequest(
            prompt=self._prompt(prompt),
            batch_size=_whole("Batch size", batch_size, 1, self.max_batch),
            max_new_tokens=_whole("Max new tokens", max_new_tokens, 1, self.max_new_tokens),
            temperature=_temperature(temperature),
            seed=_whole("Seed", seed, 0, MAX_SEED),
            pair=_name(pair),
        )

    def _prompt(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise RequestError("The prompt is empty: write one, or pick an example.")
        if len(value) > self.max_prompt:
            raise RequestError(
                f"The prompt has {len(value)} characters and this server takes {self.max_prompt}: shorten it."
            )
        return value


def _name(value: object) -> str:
    """A pair's name; "" and None, which a script may send, are the operator's own pair."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 200:
        raise RequestError("The pair must be a name of at most 200 characters, or empty for the server's own.")
    return value.strip()


def _number(value: object) -> float | None:
    """The value as a finite float, None for anything else (bool and text included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An int too large for a float is out of every range here.
    return float(value) if abs(value) < 2**53 and math.isfinite(value) else None


def _whole(name: str, value: object, low: int, high: int) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or not low <= number <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}.")
    return int(number)


def _temperature(value: object) -> float:
    number = _number(value)
    if number is None or number < 0:
        raise RequestError("Temperature must be a number of 0 or more; at 0 the likeliest token is always taken.")
    return number
