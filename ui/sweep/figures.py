"""The figures of a sweep as plain data (`Sweep`), how they are summed (`Sums`), and their `sentences`.

A point's speed-up is computed as on the page (bass_core/lanes/pace.py), over the races of one arm, in which
regular decoding and BASS took turns. A figure that is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypedDict

from bass_core import DEFAULT_METHOD, LEAST_ROUNDS, LaneSnapshot, Pace
from ui.race.looks import reference
from ui.race.verdict import LEVEL_ERRORS

from .request import Arm


class Point(TypedDict):
    """The figures of one arm.

    Attributes:
        prompt: the number of the visitor's own prompt, from 1 on, or None.
        draft_length: the draft length, fixed or a policy's name.
        speedup: over regular decoding.
        error: the relative standard error of the speed-up, from the scatter of both lanes' rounds as in the
            verdict (ui/race/verdict.py).
        against: whether the speed-up is above 1 ("ahead"), below ("behind"), or within two standard errors
            ("level").
        ms_per_token: ms per token of one sequence with BASS.
        regular_ms_per_token: the same for regular decoding.
        tokens: tokens written per row-round.
        acceptance: accepted / tested drafts.
        rounds: BASS's rounds.
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
    """`tokens` is the size of a step from which multiplying takes longer than reading, or None if not known."""

    tokens: float | None


class Overall(TypedDict):
    """The speed-up over all prompts, with the ends of its 95 % interval (ui/sweep/answer.py)."""

    prompts: int
    speedup: float
    low: float
    high: float


class SweepLine(TypedDict):
    """A line of the chart, with all points of one draft length."""

    draft_length: str | int
    label: str


class SweepProgress(TypedDict):
    """How far a sweep is.

    Attributes:
        left_s: expected seconds for the rest.
        now: the current race in words.
    """

    done: int
    races: int
    left_s: float
    now: str


class Sweep(TypedDict):
    """The state of a sweep, with all points so far. They are complete if `done`."""

    kind: Literal["measured", "predicted"]
    done: bool
    settings: dict[str, Any]
    device: str | None
    lines: list[SweepLine]
    points: list[Point]
    overall: Overall | None
    ridge: Ridge
    progress: SweepProgress | None


LABELS = {"bass": "Algorithm 1", "auto": "automatic", "cost-aware": "cost-aware"}


def length_label(draft_length: str | int) -> str:
    """Return a draft length in words."""
    return LABELS.get(str(draft_length), f"fixed length {draft_length}")


def lines(draft_lengths: Iterable[str | int], costs: str = "measured") -> list[SweepLine]:
    """Return the chart's lines for these draft lengths. `costs` ("measured" or "predicted") goes into a label."""
    suffix = {"auto": f", by {costs} cost"}
    return [
        SweepLine(draft_length=length, label=f"{length_label(length)}{suffix.get(str(length), '')}")
        for length in draft_lengths
    ]


@dataclass
class Sums:
    """Sums over the races of one arm. Each race's `accepted` is weighted by its draft tokens."""

    plain: Pace = field(default_factory=lambda: Pace.together(()))
    racing: Pace = field(default_factory=lambda: Pace.together(()))
    drafted: int = 0
    accepted: float = 0.0
    races: int = 0

    def add(self, lanes: Mapping[str, LaneSnapshot]) -> None:
        """Add a race, which may have been stopped early."""
        self.races += 1
        self.plain = Pace.together([self.plain, Pace.of(lanes[reference()])])
        self.racing = Pace.together([self.racing, Pace.of(lanes[DEFAULT_METHOD])])
        metrics = lanes[DEFAULT_METHOD]["metrics"]
        self.drafted += metrics["drafted"]
        self.accepted += metrics["drafted"] * (metrics["token_acceptance"] or 0.0)

    def joined(self, lanes: Mapping[str, LaneSnapshot]) -> Sums:
        """Return these sums plus those of a race that is still running."""
        sums = replace(self)
        sums.add(lanes)
        return sums

    def enough(self, least_ms: float) -> bool:
        """Return whether both lanes together have decoded for `least_ms`, each with enough rounds for a speed."""
        rounds = min(len(self.plain.ms), len(self.racing.ms))
        return rounds >= LEAST_ROUNDS and float(self.plain.ms.sum() + self.racing.ms.sum()) >= least_ms

    def point(self, arm: Arm) -> Point:
        """Return the figures of the races so far."""
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
    """Compare a speed-up with 1, given its relative standard error. A speed-up shown as 1.00 is level."""
    if abs(speedup - 1) <= max(LEVEL_ERRORS * error * speedup, 0.005):
        return "level"
    return "ahead" if speedup > 1 else "behind"


def ridge_of(lane: LaneSnapshot) -> Ridge:
    """Return the ridge of the machine that ran this lane of regular decoding.

    The ridge is tokens per step x (bandwidth utilisation / FLOPs utilisation). The time of the steps is in both
    utilisations and cancels out. So the ridge is the time to read at peak bandwidth / the time to multiply one
    token at peak FLOP/s (Williams et al., "Roofline", CACM 2009).
    """
    metrics, rows = lane["metrics"], Pace.of(lane).rows
    reading, multiplying = metrics["bandwidth_utilization"], metrics["flops_utilization"]
    if not reading or not multiplying or not len(rows):
        return Ridge(tokens=None)
    return Ridge(tokens=float(rows.mean()) * reading / multiplying)


AGAINST = {"ahead": "ahead of regular decoding", "level": "level with it", "behind": "slower than it"}


def sentences(sweep: Sweep) -> list[str]:
    """Return a sentence for each line that has a point, one about the ridge, and one about missing points."""
    lines = (_line(line, sweep["points"]) for line in sweep["lines"])
    return [*(sentence for sentence in lines if sentence), *_ridge(sweep), *_missing(sweep)]


def _line(line: SweepLine, points: Iterable[Point]) -> str:
    """Return, e.g., "Algorithm 1: ahead of regular decoding at batch 1 and 2, slower than it at batch 4."."""
    own = [
        point for point in points if point["draft_length"] == line["draft_length"] and point["against"] is not None
    ]
    runs = [
        (name, [point["batch"] for point in same]) for name, same in groupby(own, lambda point: point["against"])
    ]
    batches = {name: _joined([_run(run) for other, run in runs if other == name]) for name in AGAINST}
    parts = [f"{words} at batch {batches[name]}" for name, words in AGAINST.items() if batches[name]]
    if not parts:
        return ""
    # Only the first part names regular decoding. The later parts say "it".
    first = parts[0].replace("with it", "with regular decoding").replace("than it", "than regular decoding")
    return f"{line['label'][0].upper()}{line['label'][1:]}: {', '.join([first, *parts[1:]])}."


def _ridge(sweep: Sweep) -> list[str]:
    tokens = sweep["ridge"]["tokens"]
    if tokens is None:
        return ["Ridge: n/a, because this machine's peak bandwidth or FLOP/s is not known."]
    sentence = f"Ridge: from {tokens:.0f} tokens per step on, multiplying takes longer than reading."
    fixed = [line["draft_length"] for line in sweep["lines"] if isinstance(line["draft_length"], int)]
    rounds = "".join(
        f"; with {count} draft{'s' * (count > 1)} per row at batch {tokens / (count + 1):.1f}" for count in fixed
    )
    return [f"{sentence} Plain steps reach it at batch {tokens:.0f}{rounds}."]


def _missing(sweep: Sweep) -> list[str]:
    """Return a sentence about the batches of a prediction that do not fit into memory, if there are any."""
    missing = dict.fromkeys(str(point["batch"]) for point in sweep["points"] if point["speedup"] is None)
    if sweep["kind"] != "predicted" or not missing:
        return []
    return [f"Batch {_joined([*missing])}: n/a, because the models and the rows' keys and values do not fit."]


def _run(batches: list[int]) -> str:
    """Return neighbouring batches in words: "1", "1 and 2", or "1 to 8"."""
    return f"{batches[0]} to {batches[-1]}" if len(batches) > 2 else _joined([str(batch) for batch in batches])


def _joined(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
