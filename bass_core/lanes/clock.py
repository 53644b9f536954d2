"""Measured (`LaneClock`) and simulated (`PredictedClock`) clocks of lanes.

A LaneClock measures the device time inside `running()`, without graph captures, kernel compilations and kernel
loads. A PredictedClock measures nothing: for each counted step it adds the time that the step's forwards would
have taken on other hardware.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels.support import is_accelerator, on, runtime

from ..machine.setup_time import setup_ms, watch_compiler
from ..predict.billing import bill
from ..predict.clock import SimulatedClock
from ..sequence import Round, Sequence


class LaneClock:
    """Milliseconds that the device spent inside `running()`: by CUDA events on a GPU, else a monotonic clock.

    A step may give the next round to the device before it reads its own (BatchDecoder). `next_begins` then tells
    where that work begins. It counts in the next step, one step late. So the time that the host takes for a round
    is hidden if the device is still busy meanwhile, and it counts if the device has to wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.queued = device, is_accelerator(device)
        self.ms = 0.0
        # Begin and end of the work that no step has counted.
        self._late: tuple[Any, Any] | None = None
        self._next_begins: Any = None
        if self.queued:
            watch_compiler()

    def next_begins(self, event: Any) -> None:
        """Note, in `running`, the event at which the next round's work begins, or None if there is none."""
        self._next_begins = event

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block's time, without set-up (setup_time.py).

        On a GPU, that is the time until all work that the block queued is done.
        """
        if not self.queued:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.ms += 1000 * (time.perf_counter() - start)
            return
        begin, end = (runtime(self.device).Event(enable_timing=True) for _ in range(2))
        setup = setup_ms()
        # An event is recorded on the current device, so make the lane's device current.
        with on(self.device):
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._count(begin, end, setup_ms() - setup)

    def _count(self, begin: Any, end: Any, setup: float) -> None:
        """Count the work of one step, which lies between two events, and what is left of the step before."""
        late, cut, self._next_begins = self._late, self._next_begins, None
        # The step itself has waited for its own round, so waits are short unless nothing follows.
        if cut is None:
            spans, self._late = [(begin, end)], None
        elif late is None:
            spans, self._late = [(begin, cut)], (cut, end)
        else:
            spans, self._late = [], (begin, end)
        for first, last in [*([] if late is None else [late]), *spans]:
            last.synchronize()
            self.ms += max(0.0, first.elapsed_time(last) - (setup if last is end or last is cut else 0.0))

    def count(self, round_: Round, sequences: list[Sequence]) -> None:
        """Do nothing: the step's time was measured while it ran."""


class PredictedClock:
    """Milliseconds that a lane's steps would have taken on the simulated clock's hardware.

    runs_draft: whether the lane runs the pair's draft.
    """

    def __init__(self, simulated: SimulatedClock, runs_draft: bool) -> None:
        self.simulated, self.runs_draft, self.ms = simulated, runs_draft, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure nothing: the time that a step takes here doesn't matter."""
        yield

    def next_begins(self, event: Any) -> None:
        """Do nothing."""

    def count(self, round_: Round, sequences: list[Sequence]) -> None:
        """Add the predicted time of a step whose tokens are already written, and note it in the round."""
        draft_ms, verify_ms = bill(self.simulated, round_, sequences, self.runs_draft)
        self.ms += draft_ms + verify_ms
        if round_.kind != "prefill":
            round_.draft_ms, round_.verify_ms = draft_ms, verify_ms
