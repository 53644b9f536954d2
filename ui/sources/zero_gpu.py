"""Races on a ZeroGPU Space: the package `spaces` reserves a GPU for some seconds, and a forked worker runs them.

Contract: `ZeroGpu` is made once the models are loaded and before the page is launched. What its worker refuses,
and what the scheduler says of the visitor's quota, is a BassError with that sentence. Where the quota has fewer
seconds left than a race asks for, those are asked for. Shortly before they are over, what runs ends with a
sentence, since ZeroGPU would kill the worker. Only plain data travels. Read in the source of spaces 0.51.3, run
with an emulated scheduler (tests/ui/zero_gpu.py), and not on a Space.
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
from ui.sources.source import Races, Source

# Seconds that a fork takes to reach the GPU with the weights, to warm up, and to compile Triton's kernels where it
# is the first one: an estimate on the safe side. ZeroGPU counts only the seconds that were used.
START_S = 30.0
# Seconds of one step of one row, without CUDA graphs: an estimate on the safe side.
STEP_S = 0.02
# The most that is asked for, which is a day's quota of a visitor without an account (2026), and the least that
# can begin a race.
MOST_S, LEAST_S = 120, 15
# How long before the end of its reservation a race is ended.
SPARE_S = 3.0
ABORTED = "GPU task aborted"
TOO_LONG = "ZeroGPU illegal duration"
LESS = "ask for fewer tokens, a smaller batch or fewer lanes."
log = logging.getLogger(__name__)


class ZeroGpu:
    """Runs the races of `alone`, which takes a request and `stopped`, in workers of the package `spaces`."""

    def __init__(self, spaces: Any, alone: Callable[..., Generator[Snapshot, None, None]]) -> None:
        self._alone = alone
        # In a worker that has not run anything yet, when it was forked.
        self._forked_at: float | None = None
        os.register_at_fork(after_in_child=self._forked)

        def answers(races: Races, seconds: int) -> Generator[tuple[str, Any], None, None]:
            yield from self._answers(races, seconds)

        self._reserved = spaces.GPU(duration=lambda races, seconds: seconds)(answers)

    def source(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """One race, with a reservation of its own."""
        yield from self.together(partial(_single, request), seconds_of(request))

    def together(self, races: Races, seconds: float) -> Generator[Any, None, None]:
        """What `races`, which can be pickled, yields for the worker's source, within one reservation."""
        asked: int | None = min(MOST_S, math.ceil(START_S + seconds))
        began = False
        while asked is not None:
            try:
                with closing(self._reserved(races, asked)) as replies:
                    for kind, value in replies:
                        began = True
                        if kind == "failed":
                            raise RuntimeError(f"ZeroGPU's worker failed with {value}; its traceback is above.")
                        if kind == "refused":
                            raise BassError(value)
                        yield value
                return
            except gr.Error as error:
                asked = None if began else possible(error, asked)
                if asked is None:
                    raise BassError(sentence(error)) from error

    def _answers(self, races: Races, seconds: int) -> Generator[tuple[str, Any], None, None]:
        """In the worker. What goes wrong is an answer, too: an exception would cost the worker its life."""
        end = self._reserved_at() + seconds - SPARE_S

        def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
            done = False
            with closing(self._alone(request, lambda: time.time() >= end)) as snapshots:
                for snapshot in snapshots:
                    done = snapshot["done"]
                    yield snapshot
            if not done:
                raise BassError(
                    f"The GPU was reserved for {seconds} s, and they are over; what was written is kept: {LESS}"
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
        """When the reservation began: when a new worker was forked, or just now for one that is used again."""
        began, self._forked_at = self._forked_at or time.time(), None
        return began

    def _forked(self) -> None:
        self._forked_at = time.time()


def _single(request: RaceRequest, source: Source) -> Generator[Snapshot, None, None]:
    """One race as Races, which can be pickled once the request is given."""
    yield from source(request)


def seconds_of(request: RaceRequest) -> float:
    """Upper bound of the seconds that a race's lanes take, one after another."""
    return STEP_S * steps(request)


def possible(error: gr.Error, asked: int) -> int | None:
    """Fewer seconds that the visitor's quota allows, by the refusal of `asked`; None if it leaves too few."""
    if error.title == TOO_LONG:
        fewer = asked // 2
    else:
        said = str(error.message)
        wanted, left = re.search(r"(\d+)s requested", said), re.search(r"(\d+)s left", said)
        if wanted is None or left is None:
            return None
        # On a large GPU a second costs more than one of the quota.
        fewer = asked * int(left[1]) // max(1, int(wanted[1]))
    return fewer if LEAST_S <= fewer < asked else None


def sentence(error: gr.Error) -> str:
    """What the visitor reads of an error of `spaces`, whose worker names nothing but an exception's class."""
    said = str(error.message).strip()
    if said == ABORTED:
        return f"ZeroGPU ended the race, as its time was over: {LESS}"
    if " " not in said:
        return f"ZeroGPU's worker could not start ({said}): try again in a moment."
    return said if said.endswith((".", "!")) else f"{said}."
