"""Kills workers of a server while it is under load.

Contract: while the block runs, a worker that is busy is killed every `seconds`, and never while another one is
still coming back; None kills nothing. `killed` counts them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import TracebackType

import psutil

from .serving import Server

# Seconds over which a worker's use of the CPU is looked at, and that Ray's processes have for their end.
LOOK_S, ENDING_S = 0.2, 20.0


class Killer:
    """A thread that kills workers."""

    def __init__(self, server: Server, seconds: float | None) -> None:
        self._server, self._seconds, self.killed = server, seconds, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._seconds is not None
        many = len(self._server.workers())
        while not self._over.wait(self._seconds):
            workers = self._server.workers()
            if len(workers) < many:
                continue
            busiest = max(workers, key=lambda one: one.cpu_percent(LOOK_S))
            busiest.kill()
            self.killed += 1


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after a moment; one that only waits to be counted as dead does not."""
    end, left = time.monotonic() + ENDING_S, list(processes)
    while left and time.monotonic() < end:
        left = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.2)
    return left
