"""Races on a ZeroGPU Space: `spaces` reserves a GPU for some seconds, and a forked worker runs the race.

Make `ZeroGpu` after the models are loaded and before the page is launched.

- A refusal by the worker, or by the scheduler because of the visitor's quota, is a BassError with that sentence.
- If a race needs more seconds than the visitor's quota still allows, it asks for the remaining seconds.
- Shortly before the reservation is over, the race ends with a sentence, because ZeroGPU would kill the worker.
- Only plain data passes between the processes.

This follows the source of spaces 0.51.3 and was tested with an emulated scheduler (tests/ui/zero_gpu.py), not on a
Space.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any

import gradio as gr

from bass_core import BassError, Snapshot
from ui.page.request import RaceRequest
from ui.sources.queue import steps
from ui.sources.source import Races, RaceSource

# Seconds for a fork to move the weights to the GPU, to warm up and, in the first fork, to compile the Triton
# kernels. The estimate may be too high, because ZeroGPU counts only the seconds that were used.
START_S = 30.0
# Seconds that a step of one row takes without CUDA graphs. This is a safe (high) estimate.
STEP_S = 0.02
# MAX_S: the longest reservation that we ask for: the daily quota of a visitor without an account (2026).
# LEAST_S: the shortest reservation with which it is worth beginning a race.
MAX_S, LEAST_S = 120, 15
# A race ends this many seconds before its reservation does.
SPARE_S = 3.0
ABORTED = "GPU task aborted"
TOO_LONG = "ZeroGPU illegal duration"
LESS = "ask for fewer tokens, a smaller batch or fewer lanes."
log = logging.getLogger(__name__)


class ZeroGpu:
    """Runs races in workers of the package `spaces`.

    Args:
        source: runs a race. It takes a request and `stopped`, a function that returns whether to stop.
    """

    def __init__(self, spaces: Any, source: Callable[..., Generator[Snapshot, None, None]]) -> None:
        self._source = source
        # Time of the fork, in a new worker that has not run anything yet.
        self._forked_at: float | None = None
        os.register_at_fork(after_in_child=self._forked)

        def answers(races: Races, seconds: int) -> Generator[tuple[str, Any], None, None]:
            yield from self._answers(races, seconds)

        self._reserved = spaces.GPU(duration=lambda races, seconds: seconds)(answers)

    def source(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """Run one race with a separate reservation."""
        yield from self.together(partial(_single, request), seconds_of(request))

    def together(self, races: Races, seconds: float) -> Generator[Any, None, None]:
        """Run `races` in a worker within one reservation, and yield its values.

        Args:
            races: must be picklable.
            seconds: an upper bound on the seconds that they need.

        Raises:
            BassError: if the worker or the scheduler refuses.
        """
        requested: int | None = min(MAX_S, math.ceil(START_S + seconds))
        began = False
        while requested is not None:
            try:
                with closing(self._reserved(races, requested)) as replies:
                    for kind, value in replies:
                        began = True
                        if kind == "failed":
                            raise RuntimeError(f"ZeroGPU's worker failed with {value}; its traceback is above.")
                        if kind == "refused":
                            raise BassError(value)
                        yield value
                return
            except gr.Error as error:
                requested = None if began else possible(error, requested)
                if requested is None:
                    raise BassError(sentence(error)) from error

    def _answers(self, races: Races, seconds: int) -> Generator[tuple[str, Any], None, None]:
        """Run in the worker. Errors are yielded as answers, because an exception would end the worker."""
        end = self._reserved_at() + seconds - SPARE_S

        def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
            done = False
            with closing(self._source(request, lambda: time.time() >= end)) as snapshots:
                for snapshot in snapshots:
                    done = snapshot["done"]
                    yield snapshot
            if not done:
                raise BassError(
                    f"The GPU was reserved for {seconds} s, which are over. The text so far is kept: {LESS}"
                )

        try:
            for value in races(source):
                yield "value", value
        except BassError as error:
            yield "refused", str(error)
        except Exception as error:
            log.exception("A race failed in ZeroGPU's worker.")
            yield "failed", type(error).__name__

    def _reserved_at(self) -> float:
        """Return when the reservation began: at the fork of a new worker, or now for a worker that is reused."""
        began, self._forked_at = self._forked_at or time.time(), None
        return began

    def _forked(self) -> None:
        self._forked_at = time.time()


def _single(request: RaceRequest, source: RaceSource) -> Generator[Snapshot, None, None]:
    """Run one race. functools.partial(_single, request) is a Races that, unlike a closure, can be pickled."""
    yield from source(request)


def seconds_of(request: RaceRequest) -> float:
    """Return an upper bound on the seconds that all lanes of a race take together."""
    return STEP_S * steps(request)


def possible(error: gr.Error, requested: int) -> int | None:
    """Return the seconds that the visitor's quota still allows after a refusal, or None if they are too few.

    Args:
        error: the refusal.
        requested: the seconds that were refused.
    """
    if error.title == TOO_LONG:
        fewer = requested // 2
    else:
        message = str(error.message)
        wanted, left = re.search(r"(\d+)s requested", message), re.search(r"(\d+)s left", message)
        if wanted is None or left is None:
            return None
        # On a large GPU, one second uses more than one second of the quota.
        fewer = requested * int(left[1]) // max(1, int(wanted[1]))
    return fewer if LEAST_S <= fewer < requested else None


def sentence(error: gr.Error) -> str:
    """Return an error of `spaces` as a sentence for the visitor. A worker reports only a class name."""
    message = str(error.message).strip()
    if message == ABORTED:
        return f"ZeroGPU ended the race because its time was over: {LESS}"
    if " " not in message:
        return f"ZeroGPU's worker could not start ({message}): try again in a moment."
    return message if message.endswith((".", "!")) else f"{message}."
