"""Contract: turns what a person or a script sent into a checked RaceRequest, or raises RequestError.

The limits here belong to the page; what the model or the memory can't hold is refused by bass_core, as are names
of drafters, backends and lanes that it does not know.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from bass_core import RequestError, SamplingParams

MAX_NEW_TOKENS = 1024
MAX_PROMPT = 20_000
MAX_SECONDS = 600.0
MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**20
MAX_DRAFT_LENGTH = 16
LANES = ("regular", "speculative", "bass")


@dataclass(frozen=True)
class RaceRequest:
    """One race as the page may ask for it; plain data, so that it can be pickled. Names are those of `/race`.

    `pair` "" is the operator's own.
    """

    prompt: str
    batch_size: int
    max_new_tokens: int
    temperature: float
    seed: int
    top_k: int = 0
    top_p: float = 1.0
    draft_length: str | int = "auto"
    drafter: str = "auto"
    attention: str = "auto"
    scheduling: str = "fair"
    verification: str = "chen"
    time_budget_ms: float | None = None
    lanes: tuple[str, ...] = LANES
    pair: str = ""

    def settings(self) -> dict[str, Any]:
        """The fields by name, JSON-ready."""
        return {**asdict(self), "lanes": list(self.lanes)}


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
        top_k: object = 0,
        top_p: object = 1.0,
        draft_length: object = "auto",
        drafter: object = "auto",
        attention: object = "auto",
        scheduling: object = "fair",
        verification: object = "chen",
        time_budget_ms: object = None,
        lanes: object = LANES,
        pair: object = "",
    ) -> RaceRequest:
        """Return the request; raises RequestError, one sentence that says what to change."""
        return RaceRequest(
            prompt=self._prompt(prompt),
            batch_size=_whole("Batch size", batch_size, 1, self.max_batch),
            max_new_tokens=_whole("Max new tokens", max_new_tokens, 1, self.max_new_tokens),
            temperature=_temperature(temperature),
            seed=_whole("Seed", seed, 0, MAX_SEED),
            top_k=_whole("Top-k", top_k, 0, MAX_TOP_K),
            top_p=_top_p(top_p),
            draft_length=_draft_length(draft_length),
            drafter=str(drafter),
            attention=str(attention),
            scheduling=str(scheduling),
            verification=str(verification),
            time_budget_ms=_time_budget(time_budget_ms),
            lanes=_lanes(lanes),
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
    # So small a temperature is 0 to the sampler: then the page says so too.
    return 0.0 if SamplingParams(number).greedy else number


def _top_p(value: object) -> float:
    number = _number(value)
    if number is None or not 0 < number <= 1:
        raise RequestError("Top-p must be a number above 0 and at most 1; 1 leaves every token in.")
    return number


def _draft_length(value: object) -> str | int:
    """A policy's name as it is, for the library to judge; a number, also one written as text, within the limit."""
    if isinstance(value, str) and not value.strip().isdecimal():
        return value
    number = int(value) if isinstance(value, str) and len(value) < 9 else value
    return _whole("A fixed draft length", number, 1, MAX_DRAFT_LENGTH)


def _time_budget(value: object) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None or number <= 0:
        raise RequestError("The time budget must be a number of milliseconds above 0, or empty for none.")
    return number


def _lanes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("Choose at least one lane.")
    return tuple(str(name) for name in value)
