"""A peer in a separate process, under the Python that has its package.

`Child` starts the process and sends it one call after another. In the process, `serve(*how)` creates the peer; its
module imports neither torch nor transformers. It returns a description of the peer and `complete(rows, tokens)`,
which returns the text or token ids that follow each row's token ids.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S, CALL_S = 400, 600  # how long to wait for the child before giving up
Complete = Callable[[list[list[int]], int], Any]


class Child:
    """The process of a peer, for use in a `with` statement.

    If the process fails or hangs, a RuntimeError with one sentence is raised.

    Args:
        name: the peer's name; --no-NAME leaves it out of a run.
        package: the peer's package.
        serve: creates the peer in the process.
        *how: the arguments of `serve`.
        python: the Python that has the package.
        environment: variables of the process in addition to ours.

    Attributes:
        about: the description that `serve` returns.
        version: the package's version.
    """

    about: str
    version: str

    def __init__(
        self,
        name: str,
        package: str,
        serve: Callable[..., tuple[str, Complete]],
        *how: Any,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [python, "-m", "bench.peers.child", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,  # our stdout must end with the JSON document
            )
        self._send((package, serve, how))

    def __enter__(self) -> Child:
        try:
            self.about, self.version = self._answer(START_S)
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # ends the child's loop
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def complete(self, rows: list[list[int]], tokens: int) -> Any:
        """Return the peer's answer: `tokens` new tokens for each row."""
        self._send((rows, tokens))
        return self._answer(CALL_S)

    def cpu_s(self) -> float:
        """Return the seconds of CPU time that all threads of the child have used."""
        self._send(None)
        return float(self._answer(CALL_S))

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # the process has ended; _answer will report that
            self._pipe.send(message)

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


def _run(pipe: Connection) -> None:
    """Serve calls in the child. It sends each answer as a tuple of one item, and a failure as a string."""
    try:
        package, serve, how = pipe.recv()
        about, complete = serve(*how)
        pipe.send(((about, version(package)),))
        while True:
            call = pipe.recv()
            pipe.send((time.process_time() if call is None else complete(*call),))
    except (EOFError, ConnectionError):  # the parent has closed its end
        return
    except Exception as error:
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    _run(Connection(int(sys.argv[1])))
