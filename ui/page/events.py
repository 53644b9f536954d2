"""Contract: the two generator events, the page's and the API's, over one and the same race.

Each yields until the race is done and closes it in every path: cancelled (GeneratorExit), failed or finished.
No thread-bound context is held across a yield, since Gradio may resume a generator on another thread.
"""

import ctypes
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any
from uuid import uuid4

import gradio as gr

from bass_core import BassError, ModelPair, SamplingParams, race
from ui.page.limits import LANES, Limits, RaceRequest
from ui.race.feed import PageFeed
from ui.sources.models import Models

log = logging.getLogger(__name__)

Snapshot = dict[str, Any]
Source = Callable[[RaceRequest], Generator[Snapshot, None, None]]
# What a recording is asked for does not matter.
PLAYED = ("a recording", 1, 1, 0, 0)
UNEXPECTED = "Something went wrong on the server; its log has the details, and what was shown before is kept."


def race_source(pair: ModelPair, models: Models | None = None) -> Source:
    """A generator function of plain data in and out, so that a ZeroGPU worker can run it."""
    shelf = models or Models(pair)

    def snapshots(request: RaceRequest) -> Generator[Any, None, None]:
        yield from race(
            shelf.get(request.pair),
            request.prompt,
            n=request.batch_size,
            lanes=request.lanes,
            scheduling=request.scheduling,
            max_new_tokens=request.max_new_tokens,
            sampling=SamplingParams(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p),
            draft_length=request.draft_length,
            drafter=request.drafter,
            attention=request.attention,
            verification=request.verification,
            seed=request.seed,
            time_budget_ms=request.time_budget_ms,
        )

    return snapshots


class Events:
    """The handlers that the page binds; `source` gives a race's snapshots, `pair` names the models."""

    def __init__(self, source: Source, limits: Limits, pair: Mapping[str, Any] | None = None) -> None:
        self.source, self.limits, self.pair = source, limits, pair

    def run(self, *values: object) -> Iterator[tuple[Any, ...]]:
        """Takes the settings in the order of RaceRequest's fields, later ones left out or not; a recording: none.

        Yields (log, view, charts, status, Run button); gr.skip() leaves what is there as it is.
        """
        kept, status = gr.skip(), _status("done")
        try:
            request = self.limits.check(*values or PLAYED)
            yield kept, kept, kept, _status("running"), gr.update(interactive=False)
            feed = PageFeed(uuid4().hex, request, self.pair)
            with closing(self._race(request)) as snapshots:
                for snapshot in snapshots:
                    yield *feed.update(snapshot), kept, kept
        except BassError as error:
            status = _status("error", str(error))
        except Exception:
            log.exception("A race failed.")
            status = _status("error", UNEXPECTED)
        yield kept, kept, kept, status, gr.update(interactive=True)

    def stop(self) -> tuple[Any, Any]:
        """Returns (status, Run button); the running event itself is cancelled by Gradio.

        Until that is through, Gradio drops a click on Run: the event's failure handler sets it free (page.py).
        """
        return _status("stopped"), gr.skip()

    def api(
        self,
        prompt: str = "Write a Python function that reverses a string.",
        batch_size: int = 4,
        max_new_tokens: int = 64,
        temperature: float = 0.7,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        draft_length: str = "bass",
        drafter: str = "auto",
        attention: str = "auto",
        scheduling: str = "fair",
        verification: str = "chen",
        time_budget_ms: float | None = None,
        lanes: list[str] | None = None,
        pair: str = "",
    ) -> Iterator[dict[str, Any]]:
        """One prompt, several decoders: yields snapshots {"done", "lanes", "device"}, the last with done=True."""
        try:
            request = self.limits.check(
                prompt, batch_size, max_new_tokens, temperature, seed, top_k, top_p, draft_length, drafter,
                attention, scheduling, verification, time_budget_ms, LANES if lanes is None else lanes, pair,
            )  # fmt: skip
            with closing(self._race(request)) as snapshots:
                for snapshot in snapshots:
                    yield snapshot if snapshot["done"] else _without_rounds(snapshot)
        except BassError as error:
            raise gr.Error(str(error), print_exception=False) from error
        except Exception as error:
            log.exception("A race failed.")
            raise gr.Error(UNEXPECTED, print_exception=False) from error

    def _race(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """The source's snapshots, ended by a BassError once the operator's time for a race is spent."""
        end = time.monotonic() + self.limits.max_seconds
        try:
            with closing(self.source(request)) as snapshots:
                for snapshot in snapshots:
                    yield snapshot
                    if not snapshot["done"] and time.monotonic() >= end:
                        raise BassError(
                            f"This race was ended after {self.limits.max_seconds:g} s, the server's limit: ask "
                            "for fewer tokens or a smaller batch."
                        )
        finally:
            _give_memory_back()


def _give_memory_back() -> None:
    """Hand what a race freed back to the system: glibc keeps it, a piece in each thread's arena, while we live."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # a C library of another kind
            ctypes.CDLL(None).malloc_trim(0)


def _without_rounds(snapshot: Snapshot) -> Snapshot:
    """Gradio compares each whole value with the one before; the log of rounds is worth that once, at the end."""
    lanes = {name: {**lane, "rounds": []} for name, lane in snapshot["lanes"].items()}
    return {**snapshot, "lanes": lanes}


def _status(phase: str, message: str = "") -> str:
    """For the page's script; a fresh key, so that the same sentence twice in a row is still news."""
    return json.dumps({"phase": phase, "message": message, "key": uuid4().hex})
