"""The time that a lane's device works for it, and the lock that shares a lane between threads.

Contract: a LaneClock counts only what runs inside `running()`; captures, compilations and loads are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.support import is_accelerator, on, runtime

from ..machine.setup_time import setup_ms, watch_compiler


class FairLock:
    """A mutex that who waits for it gets next: a thread that steps on and on would keep a threading.Lock."""

    def __init__(self) -> None:
        self._turn, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        # Who waits holds the turn, so that the last holder can't come back before.
        with self._turn:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class LaneClock:
    """Milliseconds the device spent inside `running()`: CUDA events there, a monotonic clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.queued = device, is_accelerator(device)
        self.ms = 0.0
        if self.queued:
            watch_compiler()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time until the block ends; on a GPU until its work is done, without what happens once."""
        if not self.queued:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.ms += 1000 * (time.perf_counter() - start)
            return
        begin, end = (runtime(self.device).Event(enable_timing=True) for _ in range(2))
        setup = setup_ms()
        # An event is recorded on the current device, whichever the lane's is.
        with on(self.device):
            begin.record()
            try:
                yield
            finally:
                end.record()
                end.synchronize()
                self.ms += max(0.0, begin.elapsed_time(end) - (setup_ms() - setup))
