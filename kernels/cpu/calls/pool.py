"""The threads that help a call.

`run` calls a kernel on this thread, and on helpers if torch is set to more than one thread. Any number of threads
and processes may call it at once. The helpers belong to the process and take one call after another. If a call
gets no helper, its own thread does all the work (threads.py). An idle helper looks for work for a fraction of a
millisecond and then sleeps.
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
        """Offer a call to `helpers` helpers, or to as many as can be started."""
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
    """Start afresh after a fork, which copies none of the parent's threads."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def run(kernel: Any, phases: int, *arguments: Any) -> None:
    """Call kernel(state, threads, *arguments) on torch's number of threads, with counters for `phases` phases."""
    threads = torch.get_num_threads()
    everything, helpers = (state_of(phases), threads, *arguments), threads - 1
    # The first call of a kernel compiles it and `watch` (the helpers' code). It uses no helpers, because they
    # would only wait for the compiler.
    if not kernel.overloads:
        watch(_pool.posted, -1)
    elif helpers > 0:
        _pool.post(helpers, kernel, everything)
    kernel(*everything)
