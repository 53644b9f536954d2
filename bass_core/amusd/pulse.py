"""Whether another process uses CPU time: the sign of life of a draft that can't report yet.

Contract: CPU time used since the last call is a sign of life; a process that only waits shows none.
"""

from __future__ import annotations

import time

import psutil


class Pulse:
    """The CPU time of a process, including the children that it has waited for."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._spent, self._moved = 0.0, time.perf_counter()

    def moved(self) -> float:
        """The time.perf_counter at which new CPU time of the process was last seen, to 10 ms of CPU time."""
        try:
            spent = sum(self._process.cpu_times())
        except psutil.Error:
            return self._moved
        if spent != self._spent:
            self._spent, self._moved = spent, time.perf_counter()
        return self._moved
