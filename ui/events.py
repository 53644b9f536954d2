"""Contract: the two generator events, the page's and the API's, over one and the same race.

Each yields until the race is done and closes it in every path: cancelled (GeneratorExit), failed or finished.
No thread-bound context is held across a yield, since Gradio may resume a generator on another thread.
"""

import json
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import gradio as gr

from bass_core import BassError, ModelPair, SamplingParams, race
from ui.feed import PageFeed
from ui.limits import Limits, RaceRequest

log = logging.getLogger(__name__)

Snapshot = dict[str, Any]
Source = Callable[[RaceRequest], Generator[Snapshot, None, None]]
UNEXPECTED = "Something went wrong on the server; its log has the details, and what was shown before is kept."


def race_source(pair: ModelPair) -> Source:
    """A generator function of plain data in and out, so that a ZeroGPU worker can run it."""

    def snapshots(request: RaceRequest) -> Generator[Snapshot, None, None]:
        yield from race(
            pair,
            request.prompt,
            n=request.batch_size,
            max_new_tokens=request.max_new_tokens,
            sampling=SamplingParams(temperature=request.temperature),
            seed=request.seed,
        )

    return snapshots


class Events:
    """The handlers that the page binds; `source` gives a race's snapshots."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source, self.limits = source, limits

    def run(
        self, prompt: object, batch_size: object, max_new_tokens: object, temperature: object, seed: object
    ) -> Iterator[tuple[Any, ...]]:
        """Yields (log, view, charts, status, Run button); gr.skip() leaves what is there as it is."""
        kept, status = gr.skip(), _status("done")
        try:
            request = self.limits.check(prompt, batch_size, max_new_tokens, temperature, seed)
            yield kept, kept, kept, _status("running"), gr.update(interactive=False)
            feed = PageFeed(uuid4().hex, request)
            with closing(self.source(request)) as snapshots:
                for snapshot in snapshots:
                    yield *feed.update(snapshot), kept, kept
        except BassError as error:
            status = _status("error", str(error))
        except Exception:
            log.exception("A race failed.")
            status = _status("error", UNEXPECTED)
        yield kept, kept, kept, status, gr.update(interactive=True)

    def stop(self) -> tuple[Any, Any]:
        """Returns (status, Run button); the running event itself is cancelled by Gradio."""
        return _status("stopped"), gr.update(interactive=True)

    def api(
        self,
        prompt: str = "Write a Python function that reverses a string.",
        batch_size: int = 4,
        max_new_tokens: int = 64,
        temperature: float = 0.7,
        seed: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """One prompt, three decoders: yields snapshots {"done", "lanes", "device"}, the last with done=True."""
        try:
            request = self.limits.check(prompt, batch_size, max_new_tokens, temperature, seed)
            with closing(self.source(request)) as snapshots:
                for snapshot in snapshots:
                    yield snapshot if snapshot["done"] else _without_rounds(snapshot)
        except BassError as error:
            raise gr.Error(str(error), print_exception=False) from error


def _without_rounds(snapshot: Snapshot) -> Snapshot:
    """Gradio compares each whole value with the one before; the log of rounds is worth that once, at the end."""
    lanes = {name: {**lane, "rounds": []} for name, lane in snapshot["lanes"].items()}
    return {**snapshot, "lanes": lanes}


def _status(phase: str, message: str = "") -> str:
    """For the page's script; a fresh key, so that the same sentence twice in a row is still news."""
    return json.dumps({"phase": phase, "message": message, "key": uuid4().hex})
