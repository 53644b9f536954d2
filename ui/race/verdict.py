"""The verdict above the lanes: who is ahead, by how much, and why, in the race's own numbers.

Contract: `judge` makes the sentences from snapshots. All figures are those of Metrics (bass_core/lanes/pace.py). A
lane's speed-up over the reference is taken apart as

    speed-up = (plain steps that a round writes) / (plain steps that a round costs)

Two lanes are level if their speeds differ by less than TWICE the standard error of their ratio, from the scatter
of their rounds; the errors of two lanes add as squares. While the race runs, nothing is said of lanes that are
level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from bass_core import METHODS, LaneSnapshot, Record
from ui.page.clock import where
from ui.race.looks import look, reference

TWICE = 2.0
# Below this share of its rounds, a lane is said to have drafted in few.
FEW = 0.8
# Policies that draft only where that should pay.
CHOOSING = ("auto", "cost-aware")


class Verdict(TypedDict):
    """What is said: `head` of the race, None before there is anything to say; `lanes`: of all but the reference,
    the fastest first.
    """

    head: str | None
    lanes: dict[str, str]


@dataclass
class LaneRounds:
    """How many of a lane's rounds drafted, and the most rows in a round."""

    drafting: int = 0
    rows: int = 0

    def add(self, record: Record) -> None:
        """Count a round."""
        if record["kind"] != "prefill":
            self.drafting += record["kind"] == "verify"
            self.rows = max(self.rows, len(record["rows"]))


def judge(
    lanes: Mapping[str, LaneSnapshot],
    rounds: Mapping[str, LaneRounds],
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict on these lanes, whose rounds were counted; settings: the race's; clock: a predicted one."""
    speeds = _speeds(lanes)
    if len(speeds) < 2:
        return Verdict(head=None, lanes={})
    done = all(lane["finished"] for lane in lanes.values())
    fastest_first = sorted(speeds, key=lambda name: -speeds[name])
    head = _head(lanes, speeds, fastest_first, done)
    if head is None:
        return Verdict(head=None, lanes={})
    if clock:
        head = f"{head.removesuffix('.')}, {where(clock)}."
    said = {
        name: _equation(lanes[name], rounds[name], name, settings, clock)
        for name in fastest_first
        if name != reference()
    }
    return Verdict(head=head, lanes={name: one for name, one in said.items() if one})


def _speeds(lanes: Mapping[str, LaneSnapshot]) -> dict[str, float]:
    """The speed of each lane that has one: its speed-up, or without a reference plain steps per ms.

    A reference that failed before it wrote anything counts as none.
    """
    speeds = {name: lane["metrics"].get("speedup") for name, lane in lanes.items()}
    other = lanes.get(reference())
    if other is None or (other["error"] and not any(speeds.values())):
        known = {
            name: lane["metrics"] for name, lane in lanes.items() if lane["metrics"].get("scatter") is not None
        }
        speeds = {name: 1 / metrics["ms_per_token"] for name, metrics in known.items()}
    return {name: speed for name, speed in speeds.items() if speed}


def _head(
    lanes: Mapping[str, LaneSnapshot], speeds: Mapping[str, float], fastest_first: list[str], done: bool
) -> str | None:
    """Who is ahead; None while the race runs and nobody is."""
    first, second = fastest_first[:2]
    ratio, so_far, other = speeds[first] / speeds[second], "" if done else " so far", reference()
    if level(ratio, lanes[first], lanes[second]):
        both = f"{_name(first)} and {_name(second)} are"
        rest = [
            name
            for name in fastest_first[2:]
            if not level(speeds[first] / speeds[name], lanes[first], lanes[name])
        ]
        beaten = other if other in rest else rest[0] if rest else None
        if not done:
            return None if beaten is None else f"{both} ahead of {_name(beaten)} so far."
        before = "" if beaten is None else f", ahead of {_name(beaten)}"
        return f"{both} level{before}: the {100 * (ratio - 1):.0f} % between them may be chance."
    if first != other and other in speeds:
        speed = speeds[first] / speeds[other]
        next_one = "" if second == other else f", and {ratio:.2f}× {_name(second)}"
        return f"{_name(first)} is ahead{so_far}: {speed:.2f}× the speed of {_name(other)}{next_one}."
    return f"{_name(first)} is ahead{so_far}: {ratio:.2f}× the speed of {_name(second)}, which comes next."


def level(ratio: float, faster: LaneSnapshot, slower: LaneSnapshot) -> bool:
    """Whether speeds of this ratio may be equal but for the scatter of their rounds."""
    errors = [lane["metrics"].get("scatter") for lane in (faster, slower)]
    known = math.hypot(*(math.inf if one is None else one for one in errors))
    return ratio - 1 <= TWICE * known * ratio


def _equation(
    lane: LaneSnapshot,
    own: LaneRounds,
    name: str,
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None,
) -> str:
    """One lane's speed-up, taken apart."""
    speed, cost = (lane["metrics"].get(key) for key in ("speedup", "round_cost"))
    if speed is None or cost is None:
        return ""
    head = f"{_name(name)} {speed:.2f}×{', predicted' if clock else ''}"
    if name in METHODS and METHODS[name].overlaps:
        return f"{head}: draft and target work at the same time, so a round has no cost of its own."
    written, rows = speed * cost, len(lane["sequences"])
    joined = "but" if written > 1.005 and speed < 1 else "and"
    of = f" (for one of {rows} rows)" if own.rows < rows and own.rows == 1 else ""
    said = (
        f"{head}: a round{of} writes as much as {written:.2f} plain steps, {joined} costs as much as {cost:.2f}."
    )
    drafts = name not in METHODS or METHODS[name].drafts
    return said + (_drafted(lane, own, settings, "that" if clock else "this") if drafts else "")


def _drafted(lane: LaneSnapshot, own: LaneRounds, settings: Mapping[str, object], machine: str) -> str:
    """In how many rounds a lane drafted, where they were few, and why; machine: "this" or "that"."""
    rounds = lane["metrics"]["rounds"]
    if own.drafting >= FEW * rounds:
        return ""
    chose = settings.get("draft_length") in CHOOSING
    why = "elsewhere a draft would cost" if own.drafting else f"on {machine} machine a draft costs"
    return f" It drafted in {own.drafting} of {rounds} rounds{f': {why} more than it saves' if chose else ''}."


def _name(lane: str) -> str:
    return look(lane)["label"]
