"""The figures of a sweep's races, what a sweep yields, and the sentences that it says.

Contract: plain data, and sentences made of it. A point's speed-up is the page's (bass_core/lanes/pace.py), over
the races of one arm, in which regular decoding and BASS took turns. `error` is its relative standard error, from
the scatter of both lanes' rounds as in the verdict (ui/race/verdict.py); `against` says whether the speed-up is
above, below or, within two standard errors, level with 1. A figure that is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypedDict

from bass_core import DEFAULT_METHOD, LEAST_ROUNDS, LaneSnapshot, Pace
from ui.race.looks import reference
from ui.race.verdict import TWICE

from .request import Arm


class Point(TypedDict):
    """One arm. Times in ms a token; tokens: written a row-round; acceptance: accepted / tested drafts; prompt: the
    place of a prompt of the visitor's own.
    """

    prompt: int | None
    batch: int
    draft_length: str | int
    speedup: float | None
    error: float | None
    against: Literal["ahead", "level", "behind"] | None
    ms_per_token: float | None
    regular_ms_per_token: float | None
    tokens: float | None
    acceptance: float | None
    rounds: int | None


class Ridge(TypedDict):
    """tokens: of one step, from which on multiplying takes longer than reading; None where it is not known."""

    tokens: float | None


class Overall(TypedDict):
    """The speed-up over all prompts, with the ends of its 95 % interval over them (ui/sweep/answer.py)."""

    prompts: int
    speedup: float
    low: float
    high: float


class Line(TypedDict):
    """A line of the chart: the points with this draft length."""

    draft_length: str | int
    label: str


class Progress(TypedDict):
    """done of `races` are done, and the rest is expected to take left_s seconds; now: what runs."""

    done: int
    races: int
    left_s: float
    now: str


class Sweep(TypedDict):
    """What a sweep yields: all of its points so far. done: whether these are all."""

    kind: Literal["measured", "predicted"]
    done: bool
    settings: dict[str, Any]
    device: str | None
    lines: list[Line]
    points: list[Point]
    overall: Overall | None
    ridge: Ridge
    progress: Progress | None


LABELS = {"bass": "Algorithm 1", "auto": "automatic", "cost-aware": "cost-aware"}


def said(draft_length: str | int) -> str:
    """A draft length in words."""
    return LABELS.get(str(draft_length), f"fixed length {draft_length}")


def lines(draft_lengths: Iterable[str | int], costs: str = "measured") -> list[Line]:
    """The chart's lines for these draft lengths; costs: what a policy that goes by cost asks."""
    by = {"auto": f", by {costs} cost"}
    return [Line(draft_length=one, label=f"{said(one)}{by.get(str(one), '')}") for one in draft_lengths]


@dataclass
class Sums:
    """Sums over the races of one arm. accepted: the accepted share of the tested drafts, times `drafted`."""

    plain: Pace = field(default_factory=lambda: Pace.together(()))
    racing: Pace = field(default_factory=lambda: Pace.together(()))
    drafted: int = 0
    accepted: float = 0.0
    races: int = 0

    def add(self, lanes: Mapping[str, LaneSnapshot]) -> None:
        """Count a race, which may have been left before its end."""
        self.races += 1
        self.plain = Pace.together([self.plain, Pace.of(lanes[reference()])])
        self.racing = Pace.together([self.racing, Pace.of(lanes[DEFAULT_METHOD])])
        metrics = lanes[DEFAULT_METHOD]["metrics"]
        self.drafted += metrics["drafted"]
        self.accepted += metrics["drafted"] * (metrics["token_acceptance"] or 0.0)

    def joined(self, lanes: Mapping[str, LaneSnapshot]) -> Sums:
        """These sums with those of a race that still runs."""
        sums = replace(self)
        sums.add(lanes)
        return sums

    def enough(self, least_ms: float) -> bool:
        """Whether both lanes have decoded for this long together, each in as many rounds as a speed needs."""
        rounds = min(len(self.plain.ms), len(self.racing.ms))
        return rounds >= LEAST_ROUNDS and float(self.plain.ms.sum() + self.racing.ms.sum()) >= least_ms

    def point(self, arm: Arm) -> Point:
        """The figures of the races so far."""
        regular, bass = self.plain, self.racing
        speedup, row_rounds = bass.speedup(regular), int(bass.rows.sum())
        error = math.hypot(bass.scatter(regular), regular.scatter(regular))
        finite = error if math.isfinite(error) else None
        return Point(
            prompt=arm.prompt,
            batch=arm.batch,
            draft_length=arm.draft_length,
            speedup=speedup,
            error=finite,
            against=None if speedup is None or finite is None else against(speedup, finite),
            ms_per_token=bass.ms_per_token,
            regular_ms_per_token=regular.ms_per_token,
            tokens=int(bass.written.sum()) / row_rounds if row_rounds else None,
            acceptance=self.accepted / self.drafted if self.drafted else None,
            rounds=len(bass.ms),
        )


def against(speedup: float, error: float) -> Literal["ahead", "level", "behind"]:
    """How a speed-up with this relative standard error compares with 1; one that reads 1.00 is level."""
    if abs(speedup - 1) <= max(TWICE * error * speedup, 0.005):
        return "level"
    return "ahead" if speedup > 1 else "behind"


def ridge_of(lane: LaneSnapshot) -> Ridge:
    """The ridge, from a lane of regular decoding: its tokens a step x (share of the peak bandwidth that its
    steps reached / share of the peak FLOP/s). The steps' time is in both shares, so what is left is the time
    that reading takes at the peak over the time that multiplying one token takes: Williams et al., "Roofline",
    CACM 2009.
    """
    metrics, rows = lane["metrics"], Pace.of(lane).rows
    reading, multiplying = metrics["bandwidth_utilization"], metrics["flops_utilization"]
    if not reading or not multiplying or not len(rows):
        return Ridge(tokens=None)
    return Ridge(tokens=float(rows.mean()) * reading / multiplying)


AGAINST = {"ahead": "ahead of regular decoding", "level": "level with it", "behind": "behind it"}


def sentences(sweep: Sweep) -> list[str]:
    """One for each line that has a point, and one on the ridge."""
    lines = (_line(line, sweep["points"]) for line in sweep["lines"])
    return [*(one for one in lines if one), *_ridge(sweep), *_missing(sweep)]


def _line(line: Line, points: Iterable[Point]) -> str:
    """Where a line is ahead, level and behind: "Algorithm 1: ahead of regular decoding at batch 1 and 2"."""
    own = [one for one in points if one["draft_length"] == line["draft_length"] and one["against"] is not None]
    runs = [(name, [one["batch"] for one in same]) for name, same in groupby(own, lambda one: one["against"])]
    batches = {name: _joined([_run(run) for other, run in runs if other == name]) for name in AGAINST}
    parts = [f"{words} at batch {batches[name]}" for name, words in AGAINST.items() if batches[name]]
    if not parts:
        return ""
    # The first part names what "it" is.
    first = parts[0].replace("with it", "with regular decoding").replace("behind it", "behind regular decoding")
    return f"{line['label'][0].upper()}{line['label'][1:]}: {', '.join([first, *parts[1:]])}."


def _ridge(sweep: Sweep) -> list[str]:
    tokens = sweep["ridge"]["tokens"]
    if tokens is None:
        return ["Ridge: n/a, since what this machine reads and multiplies at most is not known."]
    said = f"Ridge: from {tokens:.0f} tokens a step on, multiplying takes longer than reading."
    fixed = [line["draft_length"] for line in sweep["lines"] if isinstance(line["draft_length"], int)]
    rounds = "".join(
        f"; with {count} draft{'s' * (count > 1)} a row at batch {tokens / (count + 1):.1f}" for count in fixed
    )
    return [f"{said} Plain steps get there at batch {tokens:.0f}{rounds}."]


def _missing(sweep: Sweep) -> list[str]:
    """The batches of a prediction that the memory does not hold."""
    missing = dict.fromkeys(str(one["batch"]) for one in sweep["points"] if one["speedup"] is None)
    if sweep["kind"] != "predicted" or not missing:
        return []
    return [f"Batch {_joined([*missing])}: n/a, since the models and the rows' keys and values do not fit."]


def _run(batches: list[int]) -> str:
    """Neighbouring batches: "1", "1 and 2", or "1 to 8"."""
    return f"{batches[0]} to {batches[-1]}" if len(batches) > 2 else _joined([str(one) for one in batches])


def _joined(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
