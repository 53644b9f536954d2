"""The verdict above the lanes: which lane is or was fastest, by how much, and why. Call `judge`.

All figures come from Metrics (bass_core/lanes/pace.py). A lane's speed-up over the reference is split into

    speed-up = (plain steps that a round writes) / (plain steps that a round costs)

For example, a round that writes 2.6 plain steps and costs 1.3 gives a speed-up of 2.00×. Two lanes are level if
their speeds differ by at most LEVEL_ERRORS standard errors of their ratio, estimated from the scatter of their
rounds; the squares of the two lanes' errors add up. While a race runs, the verdict says nothing about level lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from bass_core import METHODS, LaneSnapshot, Record
from ui.page.clock import on_machine
from ui.race.looks import look, reference

LEVEL_ERRORS = 2.0
# A lane that drafted in a smaller share of its rounds gets a sentence about it.
DRAFTING_SHARE = 0.8
# Policies that draft only if that should pay off.
COST_POLICIES = ("auto", "cost-aware")


class Verdict(TypedDict):
    """A verdict: `head` is None while no lane is ahead; `lanes` has a sentence per lane, the fastest first."""

    head: str | None
    lanes: dict[str, str]


@dataclass
class LaneRounds:
    """Counts of a lane's rounds: those that drafted, and the largest number of rows in one."""

    drafting: int = 0
    rows: int = 0

    def add(self, record: Record) -> None:
        """Count a round, unless it is a prefill."""
        if record["kind"] != "prefill":
            self.drafting += record["kind"] == "verify"
            self.rows = max(self.rows, len(record["rows"]))


def judge(
    lanes: Mapping[str, LaneSnapshot],
    rounds: Mapping[str, LaneRounds],
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return the verdict on these lanes.

    Args:
        lanes: the snapshots by lane.
        rounds: the counts of each lane's rounds.
        settings: the settings of the race.
        clock: the predicted clock of the race, or None if its times are measured.
    """
    speeds = _speeds(lanes)
    if len(speeds) < 2:
        return Verdict(head=None, lanes={})
    done = all(lane["finished"] for lane in lanes.values())
    fastest_first = sorted(speeds, key=lambda name: -speeds[name])
    head = _head(lanes, speeds, fastest_first, done)
    if head is None:
        return Verdict(head=None, lanes={})
    if clock:
        head = f"{head.removesuffix('.')}, {on_machine(clock)}."
    sentences = {
        name: _equation(lanes[name], rounds[name], name, settings, clock)
        for name in fastest_first
        if name != reference()
    }
    return Verdict(head=head, lanes={name: sentence for name, sentence in sentences.items() if sentence})


def _speeds(lanes: Mapping[str, LaneSnapshot]) -> dict[str, float]:
    """Return the speed of each lane that has one: its speed-up, or plain steps per ms if there is no reference."""
    # A lane that failed has no speed, but a reference that failed still counts if it wrote anything.
    reference_lane = lanes.get(reference())
    lanes = {name: lane for name, lane in lanes.items() if name == reference() or not lane["error"]}
    speeds = {name: lane["metrics"].get("speedup") for name, lane in lanes.items()}
    if reference_lane is None or (reference_lane["error"] and not any(speeds.values())):
        timed = {
            name: lane["metrics"] for name, lane in lanes.items() if lane["metrics"].get("scatter") is not None
        }
        speeds = {name: 1 / metrics["ms_per_token"] for name, metrics in timed.items()}
    return {name: speed for name, speed in speeds.items() if speed}


def _head(
    lanes: Mapping[str, LaneSnapshot], speeds: Mapping[str, float], fastest_first: list[str], done: bool
) -> str | None:
    """Return a sentence about the fastest lane, or None while the race runs and no lane is ahead."""
    first, second = fastest_first[:2]
    ratio, other = speeds[first] / speeds[second], reference()
    if level(ratio, lanes[first], lanes[second]):
        both = f"{_name(first)} and {_name(second)}"
        rest = [
            name
            for name in fastest_first[2:]
            if not level(speeds[first] / speeds[name], lanes[first], lanes[name])
        ]
        beaten = other if other in rest else rest[0] if rest else None
        if not done:
            return None if beaten is None else f"{both} are ahead of {_name(beaten)} so far."
        before = "" if beaten is None else f", ahead of {_name(beaten)}"
        gap = f"{100 * (ratio - 1):.0f}"
        chance = "" if gap == "0" else f": the difference of {gap} % may be chance"
        return f"{both} were level{before}{chance}."
    lead = f"{_name(first)} was fastest" if done else f"{_name(first)} is ahead so far"
    if first != other and other in speeds:
        speed = speeds[first] / speeds[other]
        next_one = "" if second == other else f", and {ratio:.2f}× {_name(second)}"
        return f"{lead}: {speed:.2f}× the speed of {_name(other)}{next_one}."
    return f"{lead}: {ratio:.2f}× the speed of {_name(second)}, which {'came' if done else 'comes'} next."


def level(ratio: float, faster: LaneSnapshot, slower: LaneSnapshot) -> bool:
    """Return whether the scatter of the rounds is enough to explain this ratio of two speeds."""
    errors = [lane["metrics"].get("scatter") for lane in (faster, slower)]
    combined = math.hypot(*(math.inf if error is None else error for error in errors))
    return ratio - 1 <= LEVEL_ERRORS * combined * ratio


def _equation(
    lane: LaneSnapshot,
    counts: LaneRounds,
    name: str,
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None,
) -> str:
    """Return a sentence that splits one lane's speed-up into its two factors."""
    speed, cost = (lane["metrics"].get(key) for key in ("speedup", "round_cost"))
    if speed is None or cost is None:
        return ""
    head = f"{_name(name)} {speed:.2f}×{', predicted' if clock else ''}"
    if name in METHODS and METHODS[name].overlaps:
        return f"{head}: draft and target work at the same time, so a round has no separate cost."
    written, rows = speed * cost, len(lane["sequences"])
    joined = "but" if written > 1.005 and speed < 1 else "and"
    of = f" (for one of {rows} rows)" if counts.rows < rows and counts.rows == 1 else ""
    sentence = (
        f"{head}: a round{of} writes as much as {written:.2f} plain steps, {joined} costs as much as {cost:.2f}."
    )
    drafts = name not in METHODS or METHODS[name].drafts
    return sentence + (_drafted(lane, counts, settings, "that" if clock else "this") if drafts else "")


def _drafted(lane: LaneSnapshot, counts: LaneRounds, settings: Mapping[str, object], machine: str) -> str:
    """Return how often a lane drafted, and why, or "". `machine`: "this", or "that" for a predicted clock."""
    rounds = lane["metrics"]["rounds"]
    if counts.drafting >= DRAFTING_SHARE * rounds:
        return ""
    by_cost = settings.get("draft_length") in COST_POLICIES
    why = "in the others a draft would cost" if counts.drafting else f"on {machine} machine a draft costs"
    reason = f": {why} more than it saves" if by_cost else ""
    return f" It drafted in {counts.drafting or 'none'} of its {rounds} rounds{reason}."


def _name(lane: str) -> str:
    return look(lane)["label"]
