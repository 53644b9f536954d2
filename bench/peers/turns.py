"""Arms take turns, and nobody computes while it is another's turn.

Contract: every round runs all arms, each with one new token (the prompt's time) and with all; the first round is
not counted. Behind every call there is a pause of SETTLE_S, in which threads that wait for the next call in a
loop go to sleep, and then WATCH_S in which the CPU time of this process and of the children is read: `busy` says
how many cores were still at work. `others` says how many cores all other programs used during the call, and what
the host of a virtual machine took away; the system counts these in steps of 10 ms. Calls with more than
MOST_OTHERS are left out, unless an arm has no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from ..report.report import median
from .arms import Arm, Rows

SETTLE_S, WATCH_S = 0.05, 0.05
# Cores that other programs may use during a call: two threads that wait for each other lose far more than this.
MOST_OTHERS = 0.1
Clock = Callable[[], float]


@dataclass
class Turns:
    """An arm's counted calls: ms of the prompts and of whole calls, token ids, and cores at other work."""

    arm: Arm
    prompt_ms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    texts: list[Rows] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median of the whole calls."""
        return median(self.ms)


def take_turns(arms: list[Arm], tokens: int, repeats: int, clocks: list[Clock]) -> list[Turns]:
    """Run all arms `repeats` times behind an uncounted round. clocks: CPU seconds of each process."""
    made = [Turns(arm) for arm in arms]
    for _ in range(repeats + 1):
        for one in made:
            start = time.perf_counter()
            one.arm.run(1)
            one.prompt_ms.append(1000 * (time.perf_counter() - start))
            _busy(clocks)
            start, everybody, we = time.perf_counter(), _machine(), _used(clocks)
            written = one.arm.run(tokens)
            seconds = time.perf_counter() - start
            one.ms.append(1000 * seconds)
            one.others.append(max(0.0, _machine() - everybody - _used(clocks) + we) / seconds)
            one.busy.append(_busy(clocks))
            one.texts += [] if written is None else [written]
    for one in made:
        counted = range(1, repeats + 1)
        kept = [call for call in counted if one.others[call] <= MOST_OTHERS] or counted
        for name in ("prompt_ms", "ms", "busy", "others"):
            setattr(one, name, [getattr(one, name)[call] for call in kept])
    return made


def _busy(clocks: list[Clock]) -> float:
    """Cores at work, of the processes with these clocks, while none of them has anything to do."""
    time.sleep(SETTLE_S)
    start, before = time.perf_counter(), _used(clocks)
    time.sleep(WATCH_S)
    return (_used(clocks) - before) / (time.perf_counter() - start)


def _used(clocks: list[Clock]) -> float:
    return sum(clock() for clock in clocks)


def _machine() -> float:
    """Seconds of CPU time that all programs together have used, and that the host has taken away."""
    times = psutil.cpu_times()
    # Guests' time is in `user` already.
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in names)
