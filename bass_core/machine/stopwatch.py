"""How long the parts of a round take on its device: by CUDA events on a GPU, by a monotonic clock on a CPU.

Contract: `mark` costs microseconds and never waits; `laps` is read after the round's wait for the device and waits
for nothing else. Set-up time (machine/setup_time.py) counts in no lap.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from kernels.support import is_accelerator, runtime

from .setup_time import setup_ms


class Stopwatch:
    """Marks points of the work that this thread gives a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.queued = device, is_accelerator(device)
        self._marks: list[tuple[Any, float]] = []

    def mark(self) -> None:
        """The work given to the device so far ends here; the rest belongs to the next lap."""
        self._marks.append((self._event() if self.queued else 1000 * time.perf_counter(), setup_ms()))

    def laps(self) -> list[float]:
        """Milliseconds between one mark and the next; forgets the marks. The last mark's work must be done."""
        marks, self._marks = self._marks, []
        if self.queued:
            # Recorded on an idle stream: this returns at once, but `elapsed_time` wants to be sure.
            marks[-1][0].synchronize()
        return [max(0.0, self._between(a, b) - (after - before)) for (a, before), (b, after) in pairwise(marks)]

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.queued else end - begin)

    def _event(self) -> Any:
        event = runtime(self.device).Event(enable_timing=True)
        event.record(runtime(self.device).current_stream(self.device))
        return event
