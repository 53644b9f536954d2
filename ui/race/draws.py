"""1,000 draws of one token of a sampled race, by regular decoding and by speculation (bass_core's `draws`).

`panel` adds the figure to the page; exact.js presses its invisible button. The draws wait for the device in the
queue of the races, and run in the same place: for a source, a DrawsRequest is a race with one snapshot, which has
no lanes.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, cast
from uuid import uuid4

import gradio as gr

from bass_core import BassError, ModelPair, Options, RequestError, Snapshot, draws
from ui.page import assets
from ui.page.events import FAILED, UNEXPECTED, Events
from ui.page.request import RaceRequest, make_request
from ui.race.feed import text

log = logging.getLogger(__name__)
OPTIONS = inspect.signature(Options).parameters
TEMPLATE = """<div class="draws" hidden><p class="draws-line" role="status"></p>
<p class="draws-before"></p><div class="draws-scroll" tabindex="0" role="group" aria-label="The draws">
<table class="draws-table"><thead></thead><tbody></tbody></table></div>
<p class="small-print draws-note"></p></div>"""


class DrawsRequest(RaceRequest):
    """A race's settings, a `row` of it, and the row's `tokens` before the position."""

    def run(self, pair: ModelPair, stopped: Callable[[], bool]) -> Generator[Snapshot, None, None]:
        arguments = self.arguments()
        prompt = arguments.pop("prompt")
        options = Options(**{name: value for name, value in arguments.items() if name in OPTIONS})
        drawn = draws(pair, prompt, row=self.row, tokens=self.tokens, options=options)
        snapshot = {"phase": "done", "done": True, "elapsed_ms": 0.0, "lanes": {}, "device": {}, "draws": drawn}
        yield cast(Snapshot, snapshot)


def make_draws(question: object, events: Events) -> DrawsRequest:
    """Check a question of the page, JSON {"settings", "row", "tokens"}. Raises RequestError."""
    try:
        asked = json.loads(str(question))
        row, tokens = asked["row"], asked["tokens"]
        right = type(row) is int and isinstance(tokens, list) and all(type(token) is int for token in tokens)
        settings = dict(asked["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError("Name a row of the race and its tokens.") from error
    if not right or len(tokens) > settings.get("max_new_tokens", 0):
        raise RequestError("Name a row of the race and its tokens.")
    return DrawsRequest(**vars(make_request(settings, events.limits)), row=row, tokens=tokens)


def panel(events: Events | None, device: dict[str, Any]) -> None:
    """Add the figure to the current layout, and bind it. Without `events`, there is no model to draw with."""
    if events is None:
        return

    def answer(question: object) -> Iterator[tuple[Any, Any]]:
        yield from drawn(events, question)

    figure = assets.part(TEMPLATE, "Bass.mountDraws(element, props, watch)", "draws")
    question = gr.Textbox(visible=False)
    ask = gr.Button("Same distribution?", elem_id="draws-ask")
    running = ask.click(
        answer,
        inputs=[question],
        outputs=[figure, ask],
        js="() => Bass.drawsQuestion()",
        trigger_mode="once",
        show_progress="minimal",
        show_progress_on=figure,
        api_visibility="private",
        **device,
    )
    running.failure(None, None, [figure, ask], js=FAILED)


def drawn(events: Events, question: object) -> Iterator[tuple[Any, Any]]:
    """Yield (state of the figure as JSON, the button) for a question of the page."""
    state: dict[str, Any] = {"run": uuid4().hex, "phase": "running", "message": "", "draws": None}
    yield text(state), gr.update(interactive=False)
    try:
        with closing(events.race(make_draws(question, events))) as snapshots:
            for snapshot in snapshots:
                state["draws"] = cast(dict[str, Any], snapshot).get("draws")
        state["phase"] = "done"
    except BassError as error:
        state |= {"phase": "error", "message": str(error)}
    except Exception:
        log.exception("Draws failed.")
        state |= {"phase": "error", "message": UNEXPECTED}
    yield text(state), gr.update(interactive=True)
