"""Run `generate` in a separate thread that works only while it has its turn (`Turns`).

`generate` reports each token to a callback, in which the thread waits for its next turn. So a lane can stream,
pause and time its steps. `take` raises the work's exceptions. After `stop` the thread has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from kernels.support import is_accelerator, on, runtime

T = TypeVar("T")


@dataclass(frozen=True)
class _Ended:
    """The work has ended: it has raised `error`, or it has returned if `error` is None."""

    error: BaseException | None = None


class Turns(Generic[T]):
    """Calls `work` with a function that hands over a result, waits for a turn and returns whether to continue."""

    def __init__(self, work: Callable[[Callable[[T], bool]], object], device: torch.device, name: str) -> None:
        self._work, self._device, self._name = work, device, name
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._handed: SimpleQueue[T | _Ended] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self) -> T | None:
        """Let the work run until its next result; return it, or None once the work has returned."""
        if self._thread is None:
            self._start()
        else:
            self._go.put(True)
        try:
            result = self._handed.get()
        except BaseException:  # Ctrl-C: the work must not go on alone
            self.stop()
            raise
        if not isinstance(result, _Ended):
            return result
        if result.error is not None:
            raise result.error
        return None

    def stop(self) -> None:
        """End the work at its next hand-over, and wait until the thread has ended."""
        self._go.put(False)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        """Start the thread with the caller's stream and number of torch threads, which are not inherited."""
        stream = runtime(self._device).current_stream(self._device) if is_accelerator(self._device) else None
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)
            entered = nullcontext() if stream is None else runtime(self._device).stream(stream)
            ended = _Ended()
            try:
                with on(self._device), entered:
                    self._work(self._hand_over)
            except BaseException as error:  # also a panic in a library written in Rust
                ended = _Ended(error)
            self._handed.put(ended)

        # Use a daemon thread, so that a program can exit in the middle of a race.
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def _hand_over(self, result: T) -> bool:
        self._handed.put(result)
        return self._go.get()
