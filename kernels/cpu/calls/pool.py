"""The threads that help a call.

Contract: `run` calls a kernel on this thread, and on helpers if torch is set to more threads than one. Any number
of threads and processes may call it at once: the helpers belong to the process, take one call after another, and a
call that gets none is finished by its own thread (threads.py). A helper that has nothing to do looks for work for
a fraction of a millisecond and then sleeps.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .threads import state_of, watch


class _Pool:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, tuple[Any, ...]]] = queue.SimpleQueue()
        self.posted = np.zeros(1, np.int64)
        self._threads = 0
        self._lock = threading.Lock()

    def post(self, helpers: int, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """Offer a call to so many helpers, or to those that can be started."""
        if self._threads < helpers:
            with self._lock, suppress(RuntimeError):
                while self._threads < helpers:
                    threading.Thread(target=self._serve, name="bass-cpu", daemon=True).start()
                    self._threads += 1
        for _ in range(min(helpers, self._threads)):
            self.calls.put((kernel, arguments))
        self.posted[0] += 1

    def _serve(self) -> None:
        while True:
            kernel, arguments = self.calls.get()
            kernel(*arguments)
            del kernel, arguments
            seen = self.posted[0]
            if self.calls.empty():
                watch(self.posted, seen)


_pool = _Pool()


def _renew() -> None:
    """A forked process has none of its parent's threads."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def run(kernel: Any, phases: int, *arguments: Any) -> None:
    """Call kernel(state, threads, *arguments) on torch's number of threads, with counters for so many phases."""
    threads = torch.get_num_threads()
    everything, helpers = (state_of(phases), threads, *arguments), threads - 1
    # The first call compiles, also what a helper runs; one that came meanwhile would only wait for that.
    if not kernel.overloads:
        watch(_pool.posted, -1)
    elif helpers > 0:
        _pool.post(helpers, kernel, everything)
    kernel(*everything)
