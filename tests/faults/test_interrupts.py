"""Ctrl-C at any moment: a call ends, leaves no thread, and the next call writes the right text.

CPython handles signals when a Python function starts and after a call of compiled code, so that is where
KeyboardInterrupt is raised here: at points spread evenly over a call, and at others while it takes, waits for or
gives back a lock.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as futures
from types import FrameType
from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate, race, stream
from tests.support import ROOT
from tests.support.models import perturbed, prompts, tiny

OURS = (f"{ROOT / 'bass_core'}/", f"{ROOT / 'kernels'}/")
# Files of the standard library in which our locks and threads wait.
WAITING = tuple(str(module.__file__) for module in (threading, contextlib, queue, futures))
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "draft_length": 3}


class Interrupt:
    """Raise KeyboardInterrupt at the `point`-th possible moment of a block in these files, in the main thread."""

    def __init__(self, point: int, files: tuple[str, ...]) -> None:
        self.left, self.files = point, files

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self.files):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def generated(method: str) -> Callable[[ModelPair], Any]:
    return lambda pair: [row.token_ids for row in generate(pair, ROWS, method=method, **OPTIONS).sequences]


def streamed(pair: ModelPair) -> Any:
    texts: list[list[int]] = [[], []]
    for round_ in stream(pair, ROWS, **OPTIONS):
        for row in round_.rows:
            texts[row.sequence] += row.tokens
    return texts


def raced(scheduling: str) -> Callable[[ModelPair], Any]:
    lanes = ["regular", "bass", "amusd", "transformers"]

    def run(pair: ModelPair) -> Any:
        *_, last = race(pair, ROWS, lanes=lanes, scheduling=scheduling, **OPTIONS)
        return {name: [row["token_ids"] for row in lane["sequences"]] for name, lane in last["lanes"].items()}

    return run


ROWS = prompts(2)
CALLS = {
    **{method: generated(method) for method in ("bass", "speculative", "amusd", "transformers")},
    "stream": streamed,
    **{f"race, {scheduling}": raced(scheduling) for scheduling in ("fair", "overlap")},
}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target = tiny("llama")
    return ModelPair(target, perturbed(target, 0.025))


def our_threads() -> set[threading.Thread]:
    """Return the running threads besides the pool of our kernels.

    A thread whose `start` was interrupted within the standard library is not running.
    """
    return {thread for thread in threading.enumerate() if thread.is_alive() and thread.name != "bass-cpu"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a finalizer
@pytest.mark.parametrize("points", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("files", [OURS + WAITING, WAITING[:1]], ids=["anywhere", "at locks"])
@pytest.mark.parametrize("call", CALLS)
def test_the_call_after_an_interrupted_one_is_right(
    pair: ModelPair, call: str, files: tuple[str, ...], points: int
) -> None:
    run = CALLS[call]
    expected = run(pair)
    with Interrupt(sys.maxsize, files) as counted:
        run(pair)
    total, threads, dtype = sys.maxsize - counted.left, our_threads(), torch.get_default_dtype()
    interrupted = arrived = 0
    for i in range(points):
        last: BaseException | None = None
        interrupt = Interrupt(1 + (2 * i + 1) * total // (2 * points), files)
        try:
            with interrupt:
                run(pair)
        except (KeyboardInterrupt, RuntimeError) as error:
            # An interrupted threading.Condition may release a lock that it doesn't hold: a RuntimeError.
            assert KeyboardInterrupt in (type(error), type(error.__context__))
            last = error  # as an interactive session does, which delays the end of its generators
            arrived += 1
        interrupted += interrupt.left <= 0  # a shorter run may have fewer moments
        assert run(pair) == expected
        del last
        deadline = time.monotonic() + 5  # an interrupted `join` leaves a thread that is about to end
        while our_threads() - threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not our_threads() - threads and torch.get_default_dtype() == dtype
    assert arrived >= 0.9 * interrupted - 1, "only one in a finalizer may be lost"
