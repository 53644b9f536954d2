"""A stand-in for the package `spaces` on ZeroGPU, without a GPU. It follows the source of spaces 0.51.3.

- `GPU` forks a worker at the first call, and keeps it until a call raises an exception.
- Arguments and values are pickled.
- An exception arrives as gr.Error with the name of its class, and a gr.Error with its own message. If the worker
  dies, the message is "GPU task aborted".
- The scheduler refuses requests of more than `left` or `most` seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator
from typing import Any

import gradio as gr


class Spaces:
    """The stand-in for the package `spaces`. `asked` has the seconds of each requested reservation."""

    def __init__(self, left: float = 1e9, most: float = 1e9) -> None:
        self.left, self.most = left, most
        self.asked: list[int] = []
        self._worker: tuple[Any, Any, Any, Any] | None = None

    def GPU(self, duration: Callable[..., int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The decorator `spaces.GPU`. `duration` returns the seconds to reserve for a call."""

        def decorated(task: Callable[..., Any]) -> Callable[..., Any]:
            def handler(*arguments: Any) -> Generator[Any, None, None]:
                self._schedule(duration(*arguments))
                yield from self._run(task, arguments)

            return handler

        return decorated

    def _schedule(self, seconds: int) -> None:
        self.asked.append(seconds)
        if seconds > self.most:
            message = f"The requested GPU duration ({seconds}s) is larger than the maximum allowed"
            raise gr.Error(message, title="ZeroGPU illegal duration", print_exception=False)
        if seconds > self.left:
            message = (
                f"You have exceeded your free ZeroGPU quota ({seconds}s requested vs. {self.left}s left). "
                "Try again in 0:12:00. "
            )
            raise gr.Error(message, title="ZeroGPU quota exceeded", print_exception=False)

    def _run(self, task: Callable[..., Any], arguments: tuple[Any, ...]) -> Generator[Any, None, None]:
        if self._worker is None:
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            stop = context.Event()
            process = context.Process(target=_work, args=(task, theirs, stop), daemon=True)
            process.start()
            theirs.close()
            self._worker = process, ours, stop, task
        process, ours, stop, _ = self._worker
        stop.clear()
        ours.send(arguments)
        ended = False
        try:
            while not ended:
                try:
                    kind, value = ours.recv()
                except EOFError:
                    self._worker = None
                    raise gr.Error("GPU task aborted", title="ZeroGPU worker error") from None
                ended = kind != "value"
                if kind == "error":
                    self.close()
                    raise gr.Error(value, title="ZeroGPU worker error")
                if not ended:
                    yield value
        except GeneratorExit:
            stop.set()
            while ours.recv()[0] == "value":
                pass
            raise

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker[0].kill()
            worker[0].join()


def _work(task: Callable[..., Any], pipe: Any, stop: Any) -> None:
    while True:
        try:
            values = task(*pipe.recv())
        except EOFError:
            os._exit(0)
        try:
            for value in values:
                if stop.is_set():
                    values.close()
                    break
                pipe.send(("value", value))
            pipe.send(("end", None))
        except Exception as error:
            pipe.send(("error", error.message if isinstance(error, gr.Error) else type(error).__name__))
