"""The figures of one race of a sweep, and what a sweep yields.

Contract: plain data. A point's speed-up is the page's: ms per token of regular decoding / that of BASS, of one
race, in which the two took turns. `error` is its relative standard error, from the scatter of both lanes'
rounds as in the verdict (ui/race/verdict.py); `against` says whether the speed-up is above, below or, within
two standard errors, level with 1. A figure that is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from bass_core import DEFAULT_METHOD, LaneSnapshot
from ui.race.looks import reference
from ui.race.verdict import EARLY, TWICE, LaneRounds

from .request import Arm


class Point(TypedDict):
    """One race. Times in ms a token; tokens: written a row-round; acceptance: accepted / tested drafts."""

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
    ridge: Ridge
    progress: Progress | None


LABELS = {
    "bass": "Algorithm 1",
    "auto": "automatic",
    "budget": "budget",
    "cost-aware": "cost-aware",
}


def said(draft_length: str | int) -> str:
    """A draft length in words."""
    return LABELS.get(str(draft_length), f"fixed, {draft_length}")


def lines(draft_lengths: Iterable[str | int], costs: str = "measured") -> list[Line]:
    """The chart's lines for these draft lengths; costs: what a policy that goes by cost asks."""
    by = {"auto": f", by {costs} cost"}
    return [Line(draft_length=one, label=f"{said(one)}{by.get(str(one), '')}") for one in draft_lengths]


def counted(lane: LaneSnapshot) -> LaneRounds:
    """The sums over a lane's rounds so far."""
    sums = LaneRounds()
    for record in lane["rounds"]:
        sums.add(record)
    return sums


def enough(lanes: Mapping[str, LaneSnapshot], least_ms: float) -> bool:
    """Whether each lane is done, or has decoded for this long and in as many rounds as a verdict needs."""
    sums = {name: counted(lane) for name, lane in lanes.items()}
    return bool(lanes) and all(
        lane["finished"] or (sums[name].ms >= least_ms and sums[name].rounds >= EARLY)
        for name, lane in lanes.items()
    )


def point(arm: Arm, lanes: Mapping[str, LaneSnapshot]) -> Point:
    """The figures of a race that was run for this arm."""
    regular, bass = lanes[reference()], lanes[DEFAULT_METHOD]
    speedup, sums = bass["metrics"]["speedup"], counted(bass)
    error = math.hypot(sums.error, counted(regular).error)
    known = error if math.isfinite(error) else None
    return Point(
        batch=arm.batch,
        draft_length=arm.draft_length,
        speedup=speedup,
        error=known,
        against=None if speedup is None or known is None else against(speedup, known),
        ms_per_token=bass["metrics"]["ms_per_token"],
        regular_ms_per_token=regular["metrics"]["ms_per_token"],
        tokens=sums.tokens / sums.row_rounds if sums.row_rounds else None,
        acceptance=bass["metrics"]["token_acceptance"],
        rounds=sums.rounds,
    )


def against(speedup: float, error: float) -> Literal["ahead", "level", "behind"]:
    """How a speed-up with this relative standard error compares with 1."""
    if abs(speedup - 1) <= TWICE * error * speedup:
        return "level"
    return "ahead" if speedup > 1 else "behind"


def ridge_of(lane: LaneSnapshot) -> Ridge:
    """The ridge, from a lane of regular decoding: its tokens a step x (share of the peak bandwidth that its
    steps reached / share of the peak FLOP/s). The steps' time is in both shares, so what is left is the time
    that reading takes at the peak over the time that multiplying one token takes: Williams et al., "Roofline",
    CACM 2009.
    """
    metrics, sums = lane["metrics"], counted(lane)
    reading, multiplying = metrics["bandwidth_utilization"], metrics["flops_utilization"]
    if not reading or not multiplying or not sums.rounds:
        return Ridge(tokens=None)
    return Ridge(tokens=sums.row_rounds / sums.rounds * reading / multiplying)
