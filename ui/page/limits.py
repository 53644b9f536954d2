"""The operator's upper bounds, and a check for each setting that a person or a script sent.

Each check takes (label, value, limits) and returns the value to use. It raises RequestError with one sentence for
the visitor. bass_core itself refuses requests beyond the model's context or the memory, and unknown
drafters, attention backends and lanes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

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
# A number of JSON, without true and false. Larger ones are out of every range here.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-(2.0**53), lt=2.0**53)]
Text = Annotated[str, StringConstraints(strict=True, strip_whitespace=True)]
_NUMBER = TypeAdapter(Number)


def checked(kind: Any, sentence: str) -> Check:
    """Return a check by pydantic: a value of the type `kind`, or RequestError with this sentence."""
    adapter = TypeAdapter(kind)

    def check(label: str, value: object, limits: Limits) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError:
            raise RequestError(sentence.format(label=label)) from None

    return check


def finite(value: object) -> float | None:
    """Return the value as a finite float, or None for anything else, including bool and text."""
    try:
        return _NUMBER.validate_python(value)
    except ValidationError:
        return None


def number(label: str, value: object, limits: Limits) -> float | None:
    """Return a finite number, or None: clock.py refuses None if the chosen clock uses this setting."""
    return finite(value)


temperature = checked(
    Annotated[Number, Field(ge=0), AfterValidator(lambda value: 0.0 if SamplingParams(value).greedy else value)],
    "Temperature must be a number of 0 or more; 0 always takes the most likely token.",
)
top_p = checked(
    Annotated[Number, Field(gt=0, le=1)], "Top-p must be a number above 0 and at most 1; 1 keeps every token."
)
min_p = checked(Annotated[Number, Field(ge=0, le=1)], "Min-p must be a number from 0 to 1; 0 keeps every token.")
penalty = checked(
    Annotated[Number, Field(ge=0.001, le=1000)], "{label} must be a number from 0.001 to 1000; 1 means no penalty."
)
time_budget = checked(
    Annotated[Number, Field(gt=0)] | None,
    "The time budget must be a number of milliseconds above 0, or empty for none.",
)
acceptance = checked(
    Annotated[Number, Field(ge=0, le=1)] | None,
    "Acceptance must be a number from 0 to 1, or empty to test this run's own drafts.",
)
prompts = checked(
    Literal["one", "lines"], 'prompts must be "one" (one prompt for all rows) or "lines" (one prompt per line).'
)
# "" and None, which a script may send, mean the operator's own pair.
pair = checked(
    Annotated[
        Text, BeforeValidator(lambda value: "" if value is None else value), Field(max_length=MAX_PAIR_NAME)
    ],
    f"The pair must be a name of at most {MAX_PAIR_NAME} characters, or empty for the server's own.",
)
stop = checked(
    Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP)], ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=MAX_STOPS),
    ]
    | None,
    f"stop must be a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP} characters, or null for none.",
)


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


def whole(low: int, high: Callable[[Limits], int]) -> Check:
    """Return a check for whole numbers from `low` to `high`, both included."""

    def check(label: str, value: object, limits: Limits) -> int:
        number, top = finite(value), high(limits)
        if number is None or not number.is_integer() or not low <= number <= top:
            raise RequestError(f"{label} must be a whole number from {low} to {top}.")
        return int(number)

    return check


def system(label: str, value: object, limits: Limits) -> str | None:
    """Require a system message, at most as long as a prompt. None and "" mean no system message."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > limits.max_prompt:
        raise RequestError(f"system must be a text of at most {limits.max_prompt} characters, or null for none.")
    return value


def grammar(label: str, value: object, limits: Limits) -> Any:
    """Require a JSON schema, regular expression or grammar, at most as long as a prompt. None means no grammar.

    bass_core compiles it, and refuses one that it can't compile.
    """
    if value is None or value == "" or value == {}:
        return None
    if not isinstance(value, str | dict) or len(str(value)) > limits.max_prompt:
        raise RequestError(
            "json_schema must be an object, and regex and grammar texts, of at most "
            f"{limits.max_prompt} characters, or null for none."
        )
    return value


def json_schema(label: str, value: object, limits: Limits) -> Any:
    """Require a JSON schema: an object, or its JSON text, which the form has. None and "" mean no schema."""
    if isinstance(value, str) and 0 < len(value) <= limits.max_prompt:
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            reason = str(error).rstrip(".")
            raise RequestError(f"The JSON schema is not JSON ({reason}): correct it, or leave it empty.") from None
    return grammar(label, value, limits)


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


def lanes(label: str, value: object, limits: Limits) -> tuple[str, ...]:
    """Require one or more names. None, which a script may send, means the page's default lanes."""
    if value is None:
        return DEFAULT_LANES
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("Choose at least one lane.")
    return tuple(str(lane) for lane in value)
