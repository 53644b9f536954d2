"""A sweep as the page or a script may ask for it: one small race after another, over batches and draft lengths.

Contract: `make_sweep` checks what was sent. A request is plain data, and so is each race that it asks for, so
that any source of races takes it. The rows of a batch are sampled: at temperature 0 the rows of one prompt
would all be alike, and would hide that each accepts its own number of drafts, so there a sweep takes
TEMPERATURE instead and says so. Raises RequestError, one sentence that says what to change.
"""

from __future__ import annotations

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
# Settings of a race that a sweep decides itself. A form may offer a predicted clock: a sweep measures.
OWN = ("batch_size", "draft_length", "lanes", "scheduling", "time_budget_ms", "clock")


class Arm(NamedTuple):
    """One race of a sweep: regular decoding beside BASS with these draft lengths."""

    batch: int
    draft_length: str | int


class ArmRequest(RaceRequest):
    """A race of a sweep. Nobody inspects its rounds, so their details are not worked out."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"inspect": False}


@dataclass(frozen=True)
class SweepRequest:
    """seconds: about how long the whole sweep may take, in wall time. resampled: TEMPERATURE in place of 0."""

    race: RaceRequest
    batches: tuple[int, ...]
    draft_lengths: tuple[str | int, ...]
    seconds: float
    resampled: bool

    @property
    def most_seconds(self) -> float:
        """Seconds that it takes at most on a machine that keeps pace."""
        return SPARE * self.seconds

    def arms(self) -> list[Arm]:
        """The races, batch by batch, so that the lines grow from the left side by side."""
        return [Arm(batch, length) for batch in self.batches for length in self.draft_lengths]

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
        if self.race.prompts == "lines":
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
        }


def make_sweep(given: Mapping[str, Any], bounds: Limits) -> SweepRequest:
    """The request for these settings of a race, and "batches", "draft_lengths" and "seconds"; what is missing
    has its default. Batches that the operator does not allow are left out of the default, and refused where
    they are named.
    """
    settings = {name: value for name, value in given.items() if name not in OWN} | {"batch_size": 1}
    if settings.get("max_new_tokens") is None:
        settings["max_new_tokens"] = min(TOKENS, bounds.max_new_tokens)
    race = make_request(settings, bounds)
    alike = race.temperature == 0 and race.prompts == "one"
    if alike:
        race.temperature = TEMPERATURE
    batches = _batches(given.get("batches"), bounds)
    lengths = _lengths(given.get("draft_lengths"), bounds)
    if len(batches) * len(lengths) > MOST_RACES:
        raise RequestError(
            f"{len(batches)} batches with {len(lengths)} draft lengths are {len(batches) * len(lengths)} races, "
            f"and a sweep runs at most {MOST_RACES}: name fewer."
        )
    return SweepRequest(race, batches, lengths, _seconds(given.get("seconds"), bounds), alike)


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
