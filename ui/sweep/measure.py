"""Measures a sweep: one race after the other, each with regular decoding and BASS. Call `measured`.

- Every arm gets an equal share of the sweep's time. Its race stops once both lanes together have decoded for that
  long. If it ends earlier, another race with the next seed follows.
- The visitor's own prompts take turns: each gets its share in several visits.
- At most one race is open at a time, and it is closed on every path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing

from bass_core import BassError, LaneSnapshot, Snapshot
from ui.page.limits import Limits
from ui.race.looks import reference
from ui.sources.source import RaceSource, waits, words

from .answer import overall
from .figures import Ridge, Sums, Sweep, SweepProgress, length_label, lines, ridge_of
from .request import Arm, SweepRequest

# Share of the sweep's time in which its lanes decode. The rest goes to reading prompts and setting up lanes.
DECODING = 0.8
# New tokens per row in the warm-up race.
WARM_UP = 8
# The maximum number of races per arm and visit. An arm with short answers needs several races to use up its share
# of the time.
MAX_REPEATS = 12
SHOW_SECONDS = 1.0
Clock = Callable[[], float]


def measured(
    request: SweepRequest, source: RaceSource, limits: Limits, clock: Clock = time.monotonic
) -> Generator[Sweep, None, None]:
    """Run the sweep and yield its state when a race begins, about once per second during it, and at the end.

    Args:
        limits: `max_seconds` limits the whole sweep.
        clock: returns seconds.

    Raises:
        BassError: if a race fails, or at the time limit. The states so far remain valid.
    """
    run = _Run(request, source, limits, clock)
    yield from run.warm_up()
    for visit in range(request.visits):
        for arm in request.arms():
            yield run.state(arm)
            yield from run.race(arm, visit)
    yield run.state(None)


class _Run:
    def __init__(self, request: SweepRequest, source: RaceSource, limits: Limits, clock: Clock) -> None:
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
        """Run a few tokens of the first race without counting them, because a pair's first rounds are slower."""
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
                    continue
                self._in_time()
                if not snapshot["lanes"] and self.clock() - self.shown >= SHOW_SECONDS:
                    yield self.state(arm, _clause(snapshot))
        self.start = self.last = self.clock()

    def race(self, arm: Arm, visit: int) -> Generator[Sweep, None, None]:
        """Race for one arm, with further seeds until its share of the time is used up, and update its figures."""
        sums, least_ms = self.sums[arm], self.least_ms * (visit + 1)
        for _ in range(MAX_REPEATS):
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
        self.sweep["points"] = [arm_sums.point(arm) for arm, arm_sums in self.sums.items() if arm_sums.races]
        self.sweep["overall"] = overall(self.sweep["points"])
        self.last = self.clock()

    def _once(self, arm: Arm, sums: Sums, least_ms: float) -> Generator[Sweep, None, dict[str, LaneSnapshot]]:
        """Run one race until it ends or the arm's time is used up. Return its lanes."""
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
        """Return the sweep so far.

        Args:
            arm: the current arm, or None if the sweep is done.
            now: words that describe the current work instead of the arm.
        """
        if arm is None:
            return {**self.sweep, "done": True, "progress": None}
        self.shown = self.clock()
        of_batch = f"batch {arm.batch}, {length_label(arm.draft_length)}"
        now = now or (of_batch if arm.prompt is None else f"prompt {arm.prompt}, {of_batch}")
        progress = SweepProgress(done=self.done, races=self.races, left_s=self._left(), now=now)
        return {**self.sweep, "progress": progress}

    def _left(self) -> float:
        """Return the expected seconds of the remaining races, from the mean so far or else the requested time."""
        each = (self.last - self.start) / self.done if self.done else self.request.seconds / self.races
        return max(each * self.races - (self.clock() - self.start), 0.0)

    def _skip(self, since: float) -> float:
        """Don't count the time since `since`, when the race waited for a worker. Return the current time."""
        now = self.clock()
        self.began, self.start, self.last = (
            moment + now - since for moment in (self.began, self.start, self.last)
        )
        return now

    def _in_time(self) -> None:
        most = self.limits.max_seconds
        if self.clock() - self.began >= most:
            raise BassError(
                f"The sweep was stopped after {most:g} s, this server's limit: ask for fewer batches, a shorter "
                "prompt or fewer tokens."
            )


def _clause(snapshot: Snapshot) -> str:
    """Return what a race without lanes is doing, as a clause, or "" for one that has lanes."""
    text = words(snapshot)
    return text[:1].lower() + text[1:]
