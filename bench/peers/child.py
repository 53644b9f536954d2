"""A peer in a process of its own, which holds that peer alone.

Contract: `Child` starts a process that makes the peer, and answers one call after another. `serve(*how)` is what
the process makes it with: a function of a module that imports neither torch nor transformers. It returns a word
about the peer and `complete(rows, tokens)`, which gives the texts or token ids that follow each row's token ids.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_S, CALL_S = 120, 600  # how long to wait for the child before giving up
Complete = Callable[[list[list[int]], int], Any]


class Child:
    """The process, from `with` until its end. RuntimeError, one sentence, where it fails or hangs.

    name: the peer's, without which a run goes on by --no-NAME. about: what `serve` said.
    """

    about: str

    def __init__(self, name: str, serve: Callable[..., tuple[str, Complete]], *how: Any) -> None:
        self.name = name
        start = multiprocessing.get_context("spawn")
        self._pipe, theirs = start.Pipe()
        self._child = start.Process(target=_run, args=(theirs, serve, how), daemon=True)
        self._child.start()
        theirs.close()

    def __enter__(self) -> Child:
        self.about = self._answer(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # ends the child's loop
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()

    def complete(self, rows: list[list[int]], tokens: int) -> Any:
        """What the peer gives for `tokens` new tokens of each row."""
        self._pipe.send((rows, tokens))
        return self._answer(CALL_S)

    def cpu_s(self) -> float:
        """Seconds of CPU time that all threads of the child have used."""
        self._pipe.send(None)
        return float(self._answer(CALL_S))

    def _answer(self, seconds: float) -> Any:
        try:
            answer = self._pipe.recv() if self._pipe.poll(seconds) else f"no answer within {seconds:g} s"
        except (EOFError, OSError):
            answer = "its process ended"
        if isinstance(answer, tuple):
            return answer[0]
        option = self.name.lower().replace(".", "-")
        raise RuntimeError(
            f"{self.name} failed ({answer}): leave it out with --no-{option}, or install another release."
        )


def _run(pipe: Connection, serve: Callable[..., tuple[str, Complete]], how: tuple[Any, ...]) -> None:
    """The child: a tuple of one is an answer, a string says what failed."""
    try:
        about, complete = serve(*how)
        pipe.send((about,))
        while True:
            asked = pipe.recv()
            pipe.send((time.process_time() if asked is None else complete(*asked),))
    except (EOFError, OSError):  # the parent has closed its end
        return
    except Exception as error:
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split()))
