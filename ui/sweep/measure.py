"""Measures a sweep: one race after another, each regular decoding beside BASS, from the page's source of races.

Contract: yields the sweep so far when a race begins, about once a second while it runs, and when it is done;
the last one has done=True. An arm has an equal share of the sweep's time: its race is left once both lanes
together have decoded for as long, and one that ends sooner is followed by another with the next seed. Prompts of
the visitor's own take turns: each has its share in several visits. At most one race is open at a time, and it is
closed on every path. Raises BassError for what a race refuses, and at the operator's time limit, which holds for
the sweep as a whole; what was yielded before stays true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing

from bass_core import BassError, LaneSnapshot, Snapshot
from ui.page.limits import Limits
from ui.race.looks import reference
from ui.sources.source import Source, waits, words

from .answer import overall
from .figures import Progress, Ridge, Sums, Sweep, lines, ridge_of, said
from .request import Arm, SweepRequest

# The part of a sweep's time that its lanes decode in; the rest goes to prompts and to making the lanes.
DECODING = 0.8
# Tokens of a row in a race that does not count.
WARM_UP = 8
# Races of an arm and visit at most; short answers end long before their share of the time.
MOST_REPEATS = 12
SHOW_SECONDS = 1.0
Clock = Callable[[], float]


def measured(
    request: SweepRequest, source: Source, limits: Limits, clock: Clock = time.monotonic
) -> Generator[Sweep, None, None]:
    """The sweep's states. clock: seconds."""
    run = _Run(request, source, limits, clock)
    yield from run.warm_up()
    for visit in range(request.visits):
        for arm in request.arms():
            yield run.state(arm)
            yield from run.race(arm, visit)
    yield run.state(None)


class _Run:
    def __init__(self, request: SweepRequest, source: Source, limits: Limits, clock: Clock) -> None:
        self.request, self.source, self.limits, self.clock = request, source, limits, clock
        self.began = self.start = self.last = self.shown = clock()
        self.races, self.done = len(request.arms()) * request.visits, 0
        self.least_ms = 1000 * DECODING * request.seconds / self.races
        self.sums = {arm: Sums() for arm in request.arms()}
        self.sweep = Sweep(
            kind="measured",
            done=False,
            settings=request.settings(),
            device=None,
            lines=lines(request.draft_lengths),
            points=[],
            overall=None,
            ridge=Ridge(tokens=None),
            progress=None,
        )

    def warm_up(self) -> Generator[Sweep, None, None]:
        """Run a few tokens of the first race that don't count: a pair's first rounds load what later ones find."""
        arm = self.request.arms()[0]
        yield self.state(arm, "warming up")
        small = self.request.race_of(arm)
        small.max_new_tokens = min(small.max_new_tokens, WARM_UP)
        since = self.clock()
        with closing(self.source(small)) as snapshots:
            for snapshot in snapshots:
                if waits(snapshot):
                    since = self._skip(since)
                    yield self.state(arm, _clause(snapshot))
                else:
                    self._in_time()
        self.start = self.last = self.clock()

    def race(self, arm: Arm, visit: int) -> Generator[Sweep, None, None]:
        """Race for one arm, with further seeds until its share of the time is used, and keep its figures."""
        sums, least_ms = self.sums[arm], self.least_ms * (visit + 1)
        for _ in range(MOST_REPEATS):
            lanes = yield from self._once(arm, sums, least_ms)
            for lane in lanes.values():
                if lane["error"]:
                    raise BassError(lane["error"])
            if self.sweep["ridge"]["tokens"] is None:
                self.sweep["ridge"] = ridge_of(lanes[reference()])
            sums.add(lanes)
            if sums.enough(least_ms):
                break
        self.done += 1
        self.sweep["points"] = [one.point(arm) for arm, one in self.sums.items() if one.races]
        self.sweep["overall"] = overall(self.sweep["points"])
        self.last = self.clock()

    def _once(self, arm: Arm, sums: Sums, least_ms: float) -> Generator[Sweep, None, dict[str, LaneSnapshot]]:
        """One race, up to its end or until the arm has had its time; returns its lanes."""
        lanes: dict[str, LaneSnapshot] = {}
        since = self.clock()
        with closing(self.source(self.request.race_of(arm, sums.races))) as snapshots:
            for snapshot in snapshots:
                if waits(snapshot):
                    since = self._skip(since)
                    yield self.state(arm, _clause(snapshot))
                    continue
                lanes = snapshot["lanes"]
                self.sweep["device"] = snapshot["device"].get("name", self.sweep["device"])
                if snapshot["done"] or (lanes and sums.joined(lanes).enough(least_ms)):
                    break
                self._in_time()
                if self.clock() - self.shown >= SHOW_SECONDS:
                    yield self.state(arm, _clause(snapshot))
        return lanes

    def state(self, arm: Arm | None, now: str = "") -> Sweep:
        """The sweep so far, with the arm that runs now or words on what does; None: it is done."""
        if arm is None:
            return {**self.sweep, "done": True, "progress": None}
        self.shown = self.clock()
        of_batch = f"batch {arm.batch}, {said(arm.draft_length)}"
        now = now or (of_batch if arm.prompt is None else f"prompt {arm.prompt}, {of_batch}")
        progress = Progress(done=self.done, races=self.races, left_s=self._left(), now=now)
        return {**self.sweep, "progress": progress}

    def _left(self) -> float:
        """Seconds that the rest should take: as long a race as those before, or what was asked for."""
        each = (self.last - self.start) / self.done if self.done else self.request.seconds / self.races
        return max(each * self.races - (self.clock() - self.start), 0.0)

    def _skip(self, since: float) -> float:
        """Leave the time since then, in which no worker had the race, out of the limit and of the estimate."""
        now = self.clock()
        self.began, self.start, self.last = (one + now - since for one in (self.began, self.start, self.last))
        return now

    def _in_time(self) -> None:
        most = self.limits.max_seconds
        if self.clock() - self.began >= most:
            raise BassError(
                f"The sweep was stopped after {most:g} s, this server's limit: ask for fewer batches, a shorter "
                "prompt or fewer tokens."
            )


def _clause(snapshot: Snapshot) -> str:
    """What a race without lanes does, within a sentence; "" for one with lanes."""
    text = words(snapshot)
    return text[:1].lower() + text[1:]
