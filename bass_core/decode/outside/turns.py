"""Work in a thread of its own that goes on only while it has its turn.

Contract: between two calls of `take` the work stands still, so a lane's clock that runs during `take` counts the
work and nothing else. Work that calls a callback in its loop, as transformers' `generate` does, can be taken step
by step that way and needs no change. What the work raises, `take` raises. After `stop` the thread has ended and
its memory is free. Non-goals: work that goes on between turns.
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
    """The work has returned, or has raised this."""

    error: Exception | None = None


class Turns(Generic[T]):
    """`work` is called with a function that hands a result over, waits for a turn and says whether to go on."""

    def __init__(self, work: Callable[[Callable[[T], bool]], object], device: torch.device, name: str) -> None:
        self._work, self._device, self._name = work, device, name
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._handed: SimpleQueue[T | _Ended] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self) -> T | None:
        """Let the work go on until its next result; None once it has returned. Raises what the work raised."""
        if self._thread is None:
            self._start()
        else:
            self._go.put(True)
        result = self._handed.get()
        if not isinstance(result, _Ended):
            return result
        if result.error is not None:
            raise result.error
        return None

    def stop(self) -> None:
        """End the work at its next hand-over, and wait until the thread is gone."""
        self._go.put(False)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        """Begin on the caller's stream and with its number of threads: a new thread has others."""
        stream = runtime(self._device).current_stream(self._device) if is_accelerator(self._device) else None
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)
            entered = nullcontext() if stream is None else runtime(self._device).stream(stream)
            ended = _Ended()
            try:
                with on(self._device), entered:
                    self._work(self._hand_over)
            except Exception as error:
                ended = _Ended(error)
            self._handed.put(ended)

        # A daemon, so that a program which ends in the middle of a race is not held up.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def _hand_over(self, result: T) -> bool:
        self._handed.put(result)
        return self._go.get()
