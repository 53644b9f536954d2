"""Time the parts of a round on its device: CUDA events on a GPU, a monotonic clock on a CPU.

`mark` costs microseconds and never waits. Read `laps` after the round has waited for the device, so that `laps`
itself need not wait. Set-up time (setup_time.py) is not counted.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from kernels.support import is_accelerator, runtime

from .setup_time import setup_ms


class Stopwatch:
    """Marks points in the work that this thread gives to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.queued = device, is_accelerator(device)
        self._marks: list[tuple[Any, float]] = []

    def mark(self) -> None:
        """End the current lap after the work given to the device so far."""
        self._marks.append((self._event() if self.queued else 1000 * time.perf_counter(), setup_ms()))

    @property
    def last(self) -> Any:
        """The event of the last mark; on a CPU its time."""
        return self._marks[-1][0]

    def laps(self) -> list[float]:
        """Return the milliseconds between successive marks, and forget the marks.

        The device must have finished the work before the last mark.
        """
        marks, self._marks = self._marks, []
        if self.queued:
            # `elapsed_time` requires this call, which returns at once because the work is done.
            marks[-1][0].synchronize()
        return [max(0.0, self._between(a, b) - (after - before)) for (a, before), (b, after) in pairwise(marks)]

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.queued else end - begin)

    def _event(self) -> Any:
        event = runtime(self.device).Event(enable_timing=True)
        event.record(runtime(self.device).current_stream(self.device))
        return event
