"""Whether another process does anything: the sign of life of a draft that can't say yet how it is.

Contract: CPU time that the process has used since it was last asked is a sign of life; waiting is none.
"""

from __future__ import annotations

import time

import psutil


class Pulse:
    """The CPU time of a process, that of the children it has waited for included."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._spent, self._moved = 0.0, time.perf_counter()

    def moved(self) -> float:
        """When the process was last found to have used CPU time, by time.perf_counter; to 10 ms of CPU time."""
        try:
            spent = sum(self._process.cpu_times())
        except psutil.Error:
            return self._moved
        if spent != self._spent:
            self._spent, self._moved = spent, time.perf_counter()
        return self._moved
