"""Contract: runs work on the device while no race runs; a race that starts waits for one step of it at most.

The work is a generator: each step is short, and closing it frees its memory. Work that a race interrupts starts
anew after the race. Non-goals: what the work is.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

Source = Callable[..., Generator[Any, None, None]]
log = logging.getLogger(__name__)


class IdleWork:
    """Runs `work` in its own thread between races, from `start` until it is done or `stop` is called."""

    def __init__(self, work: Callable[[], Generator[None, None, None]]) -> None:
        self._work = work
        self._races, self._count = 0, threading.Lock()
        self._idle, self._stopped = threading.Event(), threading.Event()
        self._idle.set()
        # Held while the work has the device.
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread; it ends before the interpreter exits."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the work after its current step."""
        self._stopped.set()
        self._idle.set()
        if self._thread.is_alive():
            self._thread.join()

    def beside(self, source: Source) -> Source:
        """`source` wrapped: during each race, from its start to its end, the work does not use the device."""

        def snapshots(*request: Any) -> Generator[Any, None, None]:
            with self._race():
                yield from source(*request)

        return snapshots

    @contextmanager
    def _race(self) -> Iterator[None]:
        """Holds the work off during one race, which may end on another thread than it started on."""
        with self._count:
            self._races += 1
            self._idle.clear()
        try:
            with self._device:
                pass  # the work has let go of it now, and won't take it again
            yield
        finally:
            with self._count:
                self._races -= 1
                if not self._races:
                    self._idle.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._finished():
                self._idle.wait()
        except Exception:
            log.exception("The work for idle times failed; it is left alone from here on.")

    def _finished(self) -> bool:
        """Run the work; True once it is done, False if it has to make room for a race or stop."""
        with self._device, closing(self._work()) as steps:
            while self._idle.is_set() and not self._stopped.is_set():
                if next(steps, self) is self:
                    return True
        return False
