"""A sweep as the page or a script may ask for it: one small race after another, over batches and draft lengths.

Contract: `make_sweep` checks what was sent. A request is plain data, and so is each race that it asks for, so
that any source of races takes it. The rows of a batch are sampled: at temperature 0 the rows of one prompt
would all be alike, and would hide that each accepts its own number of drafts, so there a sweep takes
TEMPERATURE instead and says so. With prompts of the visitor's own, the sweep goes over these in place of batches
and draft lengths. Raises RequestError, one sentence that says what to change.
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
# A sweep takes about its seconds; what it takes at most is this much of them.
SPARE = 1.25
# Most new tokens of a row: on a CPU a race's share of the time ends before, so that the batch stays full.
TOKENS = 160
TEMPERATURE = 0.7
MOST_RACES = 32
# A sweep over prompts: the most of them, how often it goes through all, and its batch and draft length.
MOST_PROMPTS, VISITS = 12, 2
PROMPTS_BATCH, PROMPTS_LENGTH = 4, "auto"
# Settings of a race that a sweep decides itself. A form may offer a predicted clock: a sweep measures.
OWN = ("batch_size", "draft_length", "lanes", "scheduling", "time_budget_ms", "clock")


class Arm(NamedTuple):
    """One race of a sweep: regular decoding beside BASS with these draft lengths.

    prompt: the place of the visitor's own prompt, from 1 on; None: the race's.
    """

    batch: int
    draft_length: str | int
    prompt: int | None = None


class ArmRequest(RaceRequest):
    """A race of a sweep. Nobody inspects its rounds, so their details are not worked out."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"inspect": False}


@dataclass(frozen=True)
class SweepRequest:
    """seconds: about how long the whole sweep may take, in wall time. resampled: TEMPERATURE in place of 0.

    own: the visitor's prompts; then there is one batch, and one draft length.
    """

    race: RaceRequest
    batches: tuple[int, ...]
    draft_lengths: tuple[str | int, ...]
    seconds: float
    resampled: bool
    own: tuple[str, ...] = ()

    @property
    def visits(self) -> int:
        """How often the sweep goes through its arms: prompts take turns, so that none has a moment of its own."""
        return VISITS if self.own else 1

    @property
    def most_seconds(self) -> float:
        """Seconds that it takes at most on a machine that keeps pace."""
        return SPARE * self.seconds

    def arms(self) -> list[Arm]:
        """The races, batch by batch, so that the lines grow from the left side by side."""
        prompts = range(1, len(self.own) + 1) if self.own else (None,)
        return [
            Arm(batch, length, prompt)
            for prompt in prompts
            for batch in self.batches
            for length in self.draft_lengths
        ]

    def race_of(self, arm: Arm, repeat: int = 0) -> ArmRequest:
        """The race of an arm; repeat: how many races of it came before, each with a seed of its own.

        With one prompt a line, the rows take the lines in turn.
        """
        own: dict[str, Any] = {
            "batch_size": arm.batch,
            "draft_length": arm.draft_length,
            "lanes": (reference(), DEFAULT_METHOD),
            "scheduling": "fair",
            "time_budget_ms": None,
            "seed": (self.race.seed + repeat) % (limits.MAX_SEED + 1),
        }
        if arm.prompt is not None:
            own["prompt"] = self.own[arm.prompt - 1]
        elif self.race.prompts == "lines":
            known = limits.lines(self.race.prompt, Limits(max_batch=self.race.batch_size))
            own["prompt"] = "\n".join(known[i % len(known)] for i in range(arm.batch))
        return ArmRequest(**vars(self.race) | own)

    def settings(self) -> dict[str, Any]:
        """What was asked for, JSON-ready: the settings that all its races share, and the sweep's own."""
        shared = {name: value for name, value in self.race.settings().items() if name not in OWN}
        return shared | {
            "batches": list(self.batches),
            "draft_lengths": list(self.draft_lengths),
            "seconds": self.seconds,
            "resampled": self.resampled,
            "own_prompts": list(self.own),
        }


def make_sweep(given: Mapping[str, Any], bounds: Limits) -> SweepRequest:
    """The request for these settings of a race, and "batches", "draft_lengths", "seconds" and "own_prompts", one
    text with all of them or a list; what is missing has its default. Batches that the operator does not allow are
    left out of the default, and refused where they are named.
    """
    own = own_prompts(given.get("own_prompts"), bounds)
    settings = {name: value for name, value in given.items() if name not in OWN} | {"batch_size": 1}
    if own:
        # What these prompts' own drafts are worth is asked, so no coin accepts them.
        settings |= {"prompt": own[0], "prompts": "one", "acceptance": None}
    if settings.get("max_new_tokens") is None:
        settings["max_new_tokens"] = min(TOKENS, bounds.max_new_tokens)
    race = make_request(settings, bounds)
    alike = race.temperature == 0 and race.prompts == "one"
    if alike:
        race.temperature = TEMPERATURE
    of_prompts = ([min(PROMPTS_BATCH, bounds.max_batch)], [PROMPTS_LENGTH]) if own else (None, None)
    named = (given.get("batches"), given.get("draft_lengths"))
    asked = [default if value is None else value for value, default in zip(named, of_prompts, strict=True)]
    batches, lengths = _batches(asked[0], bounds), _lengths(asked[1], bounds)
    if own and len(batches) * len(lengths) > 1:
        raise RequestError("A sweep over prompts has one batch and one draft length: name one of each.")
    if len(batches) * len(lengths) > MOST_RACES:
        raise RequestError(
            f"{len(batches)} batches with {len(lengths)} draft lengths are {len(batches) * len(lengths)} races, "
            f"and a sweep runs at most {MOST_RACES}: name fewer."
        )
    return SweepRequest(race, batches, lengths, _seconds(given.get("seconds"), bounds), alike, own)


def own_prompts(value: object, bounds: Limits) -> tuple[str, ...]:
    """The visitor's own prompts, none of a blank text. A text has one a line or, where it has blank lines, one
    between each two of them.
    """
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        text = "\n".join(line.rstrip() for line in value.strip().splitlines())
        value = re.split(r"\n{2,}" if "\n\n" in text else r"\n", text) if text else []
        if not value:
            return ()
    if not isinstance(value, list | tuple):
        raise RequestError("own_prompts must be a list of texts, or null for the one prompt.")
    if len(value) == 1:
        raise RequestError(
            "One prompt gives no interval: write at least two, or leave the field empty to measure the prompt of "
            'the tab "Race".'
        )
    if len(value) > MOST_PROMPTS:
        raise RequestError(
            f"There are {len(value)} prompts, and a sweep takes at most {MOST_PROMPTS}: remove some."
        )
    return tuple(limits.prompt("", one, bounds) for one in value)


def _batches(value: object, bounds: Limits) -> tuple[int, ...]:
    """Different batch sizes, in ascending order."""
    if value is None:
        return tuple(batch for batch in BATCHES if batch <= bounds.max_batch)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError("batches must be a list of batch sizes, such as [1, 2, 4, 8].")
    check = limits.whole(1, lambda most: most.max_batch)
    return tuple(sorted({check("Each batch", one, bounds) for one in value}))


def _lengths(value: object, bounds: Limits) -> tuple[str | int, ...]:
    """Different draft lengths, as a race takes them, in the order in which they came."""
    if value is None:
        value = default_lengths(FIXED)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError('draft_lengths must be a list of draft lengths, such as ["bass", "auto", 4].')
    return tuple(dict.fromkeys(limits.draft_length("", one, bounds) for one in value))


def default_lengths(fixed: object) -> list[Any]:
    """The draft lengths of the page's sweep: Algorithm 1, the default policy, and a fixed one."""
    return ["bass", "auto", fixed]


def _seconds(value: object, bounds: Limits) -> float:
    """About how long the sweep may take: 5 s or more, up to the operator's limit, and by default half of that."""
    if value is None:
        # A busy machine takes longer than it was given: that shall not reach the limit.
        return min(SECONDS, bounds.max_seconds / 2)
    number = limits.finite(value)
    if number is None or not 5 <= number <= bounds.max_seconds:
        raise RequestError(f"seconds must be a number from 5 to {bounds.max_seconds:g}, this server's limit.")
    return number
