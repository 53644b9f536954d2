"""A sweep as the page or a script may request it: small races, one after the other. Call `make_sweep`.

A sweep covers batches and draft lengths, or the visitor's own prompts at one batch and draft length. A request is
plain data, and so is each of its races, so any source can run them. At temperature 0, all rows of one prompt would
be equal. This would hide that each row accepts a different number of drafts. So a sweep replaces temperature 0 by
TEMPERATURE, and its caption mentions that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bass_core import DEFAULT_METHOD, RequestError
from ui.page import limits
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.race.looks import reference

BATCHES = (1, 2, 4, 8)
FIXED = 4
SECONDS = 60.0
# A sweep aims at its requested seconds and takes at most SPARE times as long.
SPARE = 1.25
# The maximum number of new tokens per row. On a CPU, a race's time runs out before a row has that many, so every
# row stays in the batch.
TOKENS = 160
TEMPERATURE = 0.7
MAX_RACES = 32
# For a sweep over prompts: the maximum number of prompts, the visits per prompt, the batch and the draft length.
MAX_PROMPTS, VISITS = 12, 2
PROMPTS_BATCH, PROMPTS_LENGTH = 4, "auto"
# The settings of a race that a sweep chooses itself, whatever the form says. They include the clock, because
# a sweep measures even if the form asks for a predicted clock.
SWEEP_SETTINGS = ("batch_size", "draft_length", "lanes", "scheduling", "time_budget_ms", "clock")


class Arm(NamedTuple):
    """One combination that a sweep measures: races of regular decoding and BASS with these settings.

    Attributes:
        batch: rows.
        draft_length: fixed, or the name of a policy.
        prompt: the number of the visitor's own prompt, from 1 on, or None for the race's prompt.
    """

    batch: int
    draft_length: str | int
    prompt: int | None = None


class ArmRequest(RaceRequest):
    """A race of a sweep, without details of its rounds, because nobody inspects them."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"inspect": False}


@dataclass(frozen=True)
class SweepRequest:
    """A checked sweep.

    Attributes:
        race: the settings that all its races share.
        batches: batch sizes, ascending.
        draft_lengths: fixed lengths and names of policies.
        seconds: about how long the whole sweep may take, in wall time.
        resampled: whether the temperature is TEMPERATURE instead of 0.
        own: the visitor's own prompts. If there are any, there is only one batch and one draft length.
    """

    race: RaceRequest
    batches: tuple[int, ...]
    draft_lengths: tuple[str | int, ...]
    seconds: float
    resampled: bool
    own: tuple[str, ...] = ()

    @property
    def visits(self) -> int:
        """How often the sweep visits each arm. Prompts take turns, so that a busy moment does not hit just one."""
        return VISITS if self.own else 1

    @property
    def most_seconds(self) -> float:
        """Upper bound of the sweep's seconds, unless the machine is too busy to keep to the plan."""
        return SPARE * self.seconds

    def arms(self) -> list[Arm]:
        """Return the arms, batch by batch, so that all lines of the chart grow from the left together."""
        prompts = range(1, len(self.own) + 1) if self.own else (None,)
        return [
            Arm(batch, length, prompt)
            for prompt in prompts
            for batch in self.batches
            for length in self.draft_lengths
        ]

    def race_of(self, arm: Arm, repeat: int = 0) -> ArmRequest:
        """Return a race of an arm; `repeat`, the number of its earlier races, is added to the seed."""
        changed: dict[str, Any] = {
            "batch_size": arm.batch,
            "draft_length": arm.draft_length,
            "lanes": (reference(), DEFAULT_METHOD),
            "scheduling": "fair",
            "time_budget_ms": None,
            "seed": (self.race.seed + repeat) % (limits.MAX_SEED + 1),
        }
        if arm.prompt is not None:
            changed["prompt"] = self.own[arm.prompt - 1]
        elif self.race.prompts == "lines":
            prompts = limits.lines(self.race.prompt, Limits(max_batch=self.race.batch_size))
            changed["prompt"] = "\n".join(prompts[i % len(prompts)] for i in range(arm.batch))
        return ArmRequest(**vars(self.race) | changed)

    def settings(self) -> dict[str, Any]:
        """Return the settings that all races share plus those of the sweep, ready for JSON."""
        shared = {name: value for name, value in self.race.settings().items() if name not in SWEEP_SETTINGS}
        return shared | {
            "batches": list(self.batches),
            "draft_lengths": list(self.draft_lengths),
            "seconds": self.seconds,
            "resampled": self.resampled,
            "own_prompts": list(self.own),
        }


def make_sweep(given: Mapping[str, Any], bounds: Limits) -> SweepRequest:
    """Check the settings of a sweep and return the request.

    Args:
        given: the settings of a race, plus "batches", "draft_lengths", "seconds" and "own_prompts" (a list, or one
            text with all prompts). Missing ones get their defaults. The default batches stay within `bounds`.
        bounds: the operator's upper bounds.

    Raises:
        RequestError: for a value that is not allowed.
    """
    own = own_prompts(given.get("own_prompts"), bounds)
    settings = {name: value for name, value in given.items() if name not in SWEEP_SETTINGS} | {"batch_size": 1}
    if own:
        # A sweep over prompts measures how many drafts are accepted for each prompt, so switch off synthetic
        # acceptance.
        settings |= {"prompt": own[0], "prompts": "one", "acceptance": None}
    if settings.get("max_new_tokens") is None:
        settings["max_new_tokens"] = min(TOKENS, bounds.max_new_tokens)
    race = make_request(settings, bounds)
    equal_rows = race.temperature == 0 and race.prompts == "one"
    if equal_rows:
        race.temperature = TEMPERATURE
    defaults = ([min(PROMPTS_BATCH, bounds.max_batch)], [PROMPTS_LENGTH]) if own else (None, None)
    requested = (given.get("batches"), given.get("draft_lengths"))
    chosen = [default if value is None else value for value, default in zip(requested, defaults, strict=True)]
    batches, lengths = _batches(chosen[0], bounds), _lengths(chosen[1], bounds)
    if own and len(batches) * len(lengths) > 1:
        raise RequestError("A sweep over prompts has one batch and one draft length: name one of each.")
    if len(batches) * len(lengths) > MAX_RACES:
        raise RequestError(
            f"{len(batches)} batches with {len(lengths)} draft lengths are {len(batches) * len(lengths)} races, "
            f"and a sweep runs at most {MAX_RACES}: name fewer."
        )
    return SweepRequest(race, batches, lengths, _seconds(given.get("seconds"), bounds), equal_rows, own)


def own_prompts(value: object, bounds: Limits) -> tuple[str, ...]:
    """Return the visitor's own prompts, none for a blank value.

    A text has one prompt per line or, if it contains blank lines, prompts of several lines separated by them.
    """
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        text = "\n".join(line.rstrip() for line in value.strip().splitlines())
        value = re.split(r"\n{2,}" if "\n\n" in text else r"\n", text) if text else []
        if not value:
            return ()
    if not isinstance(value, list | tuple):
        raise RequestError("own_prompts must be a list of texts, or null to use the prompt.")
    if len(value) == 1:
        raise RequestError(
            "One prompt gives no interval: write at least two, or leave the field empty to measure the prompt of "
            'the tab "Race".'
        )
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"There are {len(value)} prompts, and a sweep takes at most {MAX_PROMPTS}: remove some."
        )
    return tuple(limits.prompt("", text, bounds) for text in value)


def _batches(value: object, bounds: Limits) -> tuple[int, ...]:
    """Return the distinct batch sizes in ascending order."""
    if value is None:
        return tuple(batch for batch in BATCHES if batch <= bounds.max_batch)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("batches must be a list of batch sizes, such as [1, 2, 4, 8].")
    check = limits.whole(1, lambda most: most.max_batch)
    return tuple(sorted({check("Each batch", batch, bounds) for batch in value}))


def _lengths(value: object, bounds: Limits) -> tuple[str | int, ...]:
    """Return the distinct draft lengths, as a race takes them, in their original order."""
    if value is None:
        value = default_lengths(FIXED)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError('draft_lengths must be a list of draft lengths, such as ["bass", "auto", 4].')
    return tuple(dict.fromkeys(limits.draft_length("", length, bounds) for length in value))


def default_lengths(fixed: object) -> list[Any]:
    """Return the draft lengths of the page's sweep: Algorithm 1, the default policy, and a fixed length."""
    return ["bass", "auto", fixed]


def _seconds(value: object, bounds: Limits) -> float:
    """Return about how long the sweep may take: from 5 s to the operator's limit."""
    if value is None:
        # At most half of the limit: a busy machine takes longer than planned.
        return min(SECONDS, bounds.max_seconds / 2)
    number = limits.finite(value)
    if number is None or not 5 <= number <= bounds.max_seconds:
        raise RequestError(f"seconds must be a number from 5 to {bounds.max_seconds:g}, this server's limit.")
    return number
