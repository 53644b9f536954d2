"""The verdict above the lanes: who is ahead, by how much, and why, in the race's own numbers.

Contract: sentences from snapshots alone. A lane's speed-up over the reference (m = ms per token, the page's
figure) is taken apart as

    speed-up = m_reference / m = (tokens a row and round) / (cost of a round of each row, in plain steps)

The cost is the lane's time, divided by the rounds of all its rows, over that of the reference, whose rounds write
one token a row. Two lanes are level if their times per token differ
by less than TWICE the standard error of that ratio. Of R rounds that wrote t_i tokens in s_i ms a lane's relative
error is sqrt(R / (R - 1) sum((t_i - r s_i)^2)) / sum(t_i), where r = sum(t_i) / sum(s_i) (Cochran, Sampling
Techniques, section 6.4); the errors of two lanes add as squares. Nothing is said of a lane before it has EARLY
rounds or has finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from bass_core import METHODS, LaneSnapshot, Record
from ui.page.clock import where
from ui.race.looks import look, reference

EARLY, TWICE = 8, 2.0
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
    """Sums over a lane's rounds.

    drafting: rounds that drafted; rows: the most in a round; row_rounds: rounds, each counted once for each of its
    rows; tokens, ms: written and spent in all.
    """

    rounds: int = 0
    drafting: int = 0
    rows: int = 0
    row_rounds: int = 0
    tokens: int = 0
    ms: float = 0.0
    _at: float = 0.0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, record: Record) -> None:
        """Count a round; a prefill moves the clock alone."""
        spent, self._at = record["time_ms"] - self._at, record["time_ms"]
        if record["kind"] == "prefill":
            return
        tokens = sum(row["written"] for row in record["rows"])
        self.rounds, self.drafting = self.rounds + 1, self.drafting + (record["kind"] == "verify")
        self.rows = max(self.rows, len(record["rows"]))
        self.row_rounds, self.tokens = self.row_rounds + len(record["rows"]), self.tokens + tokens
        self.ms += spent
        of_tokens, of_both, of_ms = self._squares
        self._squares = (of_tokens + tokens**2, of_both + tokens * spent, of_ms + spent**2)

    def next_race(self) -> None:
        """The records that follow are of another race, whose clock begins at 0."""
        self._at = 0.0

    @property
    def error(self) -> float:
        """The relative standard error of tokens a ms; infinite before two rounds."""
        if self.rounds < 2 or not self.tokens or not self.ms:
            return math.inf
        rate = self.tokens / self.ms
        of_tokens, of_both, of_ms = self._squares
        left = max(of_tokens - 2 * rate * of_both + rate**2 * of_ms, 0.0)
        return math.sqrt(left * self.rounds / (self.rounds - 1)) / self.tokens


def judge(
    lanes: Mapping[str, LaneSnapshot],
    rounds: Mapping[str, LaneRounds],
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict on these lanes, whose rounds were counted; settings: the race's; clock: a predicted one."""
    known = [
        name
        for name, lane in lanes.items()
        if lane["metrics"].get("ms_per_token") and (lane["finished"] or rounds[name].rounds >= EARLY)
    ]
    if len(known) < 2:
        return Verdict(head=None, lanes={})
    done = all(lane["finished"] for lane in lanes.values())
    fastest_first = sorted(known, key=lambda name: lanes[name]["metrics"]["ms_per_token"] or math.inf)
    said = {
        name: _equation(lanes[name], rounds[name], name, rounds[reference()].rows, settings, clock)
        for name in fastest_first
        if name != reference() and reference() in known
    }
    head = _head(lanes, rounds, known, done)
    if clock:
        head = f"{head.removesuffix('.')}, {where(clock)}."
    return Verdict(head=head, lanes={name: one for name, one in said.items() if one})


def _head(
    lanes: Mapping[str, LaneSnapshot], rounds: Mapping[str, LaneRounds], known: list[str], done: bool
) -> str:
    """Who is ahead."""
    times = {name: lanes[name]["metrics"]["ms_per_token"] or math.inf for name in known}
    first, second = sorted(times, key=lambda name: times[name])[:2]
    ratio, so_far = times[second] / times[first], "" if done else " so far"
    if _level(ratio, rounds[first], rounds[second]):
        other = reference()
        beaten = other in known and not _level(times[other] / times[first], rounds[first], rounds[other])
        before = f", ahead of {_name(other)}" if beaten and other not in (first, second) else ""
        apart = f"the {100 * (ratio - 1):.0f} % between them may be chance, so few were the rounds"
        return f"{_name(first)} and {_name(second)} are level{so_far}{before}: {apart}."
    if first != reference() and reference() in known:
        other = reference()
        speed = times[other] / times[first]
        next_one = "" if second == other else f", and {ratio:.2f}× {_name(second)}"
        return f"{_name(first)} is ahead{so_far}: {speed:.2f}× the speed of {_name(other)}{next_one}."
    return f"{_name(first)} is ahead{so_far}: {ratio:.2f}× the speed of {_name(second)}, which comes next."


def _level(ratio: float, faster: LaneRounds, slower: LaneRounds) -> bool:
    """Whether times per token of this ratio may be equal but for the scatter of their rounds."""
    return ratio - 1 <= TWICE * math.hypot(faster.error, slower.error) * ratio


def _equation(
    lane: LaneSnapshot,
    own: LaneRounds,
    name: str,
    rows: int,
    settings: Mapping[str, object],
    clock: Mapping[str, Any] | None,
) -> str:
    """One lane's speed-up, taken apart; rows: of the reference."""
    speed = lane["metrics"].get("speedup")
    if speed is None or not own.row_rounds:
        return ""
    head = f"{_name(name)} {speed:.2f}×{', predicted' if clock else ''}"
    if name in METHODS and METHODS[name].overlaps:
        return f"{head}: draft and target work at the same time, so a round has no cost of its own."
    tokens = own.tokens / own.row_rounds
    cost = tokens / speed
    joined = "but" if tokens > 1.005 and speed < 1 else "and"
    each, what = "", "a round"
    if rows > 1 and own.rows > 1:
        each = f" for each of {rows} rows"
    elif rows > 1:
        what = f"a round of each of {rows} rows, one after another,"
    said = f"{head}: {tokens:.2f} tokens a round{each}, {joined} {what} cost {cost:.2f} plain steps."
    drafts = name not in METHODS or METHODS[name].drafts
    return said + (_drafted(own, settings, "there" if clock else "here") if drafts else "")


def _drafted(own: LaneRounds, settings: Mapping[str, object], here: str) -> str:
    """In how many rounds a lane drafted, where they were few, and why; here: "here" or "there"."""
    if own.drafting >= FEW * own.rounds:
        return ""
    count = str(own.drafting) if own.drafting else "none"
    chose = settings.get("draft_length") in CHOOSING
    why = "elsewhere a draft would cost" if own.drafting else "a draft costs"
    return (
        f" It drafted in {count} of {own.rounds} rounds{f': {why} more than it brings {here}' if chose else ''}."
    )


def _name(lane: str) -> str:
    return look(lane)["label"]
