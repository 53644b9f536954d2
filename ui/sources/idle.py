"""Runs background work on the device while no race runs. A race that starts waits for at most one step of it.

The work is a generator. Each step is short, and closing the generator frees its memory. After a race, the work
starts again from the beginning: the race interrupted it, or found more to do.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

AnySource = Callable[..., Generator[Any, None, None]]
log = logging.getLogger(__name__)


class IdleWork:
    """Runs `work` in a thread between races, from `start` until `stop` is called or the work fails."""

    def __init__(self, work: Callable[[], Generator[None, None, None]]) -> None:
        self._work = work
        self._races, self._count = 0, threading.Lock()
        self._idle, self._stopped = threading.Event(), threading.Event()
        self._idle.set()
        # Set if the work should start: at first, after the last race, and to wake the thread for `stop`.
        self._due = threading.Event()
        self._due.set()
        # Locked while the work uses the device.
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread. It ends before the interpreter exits."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop the work after its current step."""
        self._stopped.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join()

    def pausing_for(self, source: AnySource) -> AnySource:
        """Wrap `source` so that the work leaves the device to each of its races, from start to end."""

        def snapshots(*request: Any) -> Generator[Any, None, None]:
            with self._race():
                yield from source(*request)

        return snapshots

    @contextmanager
    def _race(self) -> Iterator[None]:
        """Keep the work off the device during one race. The race may start and end on different threads."""
        with self._count:
            self._races += 1
            self._idle.clear()
        try:
            with self._device:
                pass  # the work has released the device and won't take it again before the race ends
            yield
        finally:
            with self._count:
                self._races -= 1
                if not self._races:
                    self._idle.set()
                    self._due.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._due.wait()
                self._due.clear()
                self._work_until_race()
        except Exception:
            log.exception("The background work for idle times failed and will not be started again.")

    def _work_until_race(self) -> None:
        """Run the work until it is done, a race starts, or `stop` is called."""
        with self._device, closing(self._work()) as steps:
            while self._idle.is_set() and not self._stopped.is_set() and next(steps, self) is not self:
                pass
