"""The parts of the page that show a race. A page saved as one file (webpage.py) has the same, from this list.

`build` adds them to the page. Each part is a fixed template and the JavaScript that mounts it, which may use
`element`, `props.value` and `server.recording(name)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr
from starlette.responses import Response

from bass_core import METHODS, __version__
from ui.page import assets
from ui.page.request import keywords
from ui.race import formulas
from ui.race import parts as race
from ui.race.feed import text
from ui.race.looks import looks, reference
from ui.recordings.recording import FORMAT
from ui.recordings.revision import revision
from ui.recordings.shelf import TEMPLATE, RecordingOffer
from ui.sweep import readers

PAPER = "https://arxiv.org/abs/2404.15778"


@dataclass(frozen=True)
class Part:
    """One part of the page.

    Attributes:
        template: its HTML, without values from outside.
        script: JavaScript that mounts it.
        value: JSON for its script.
        after: JavaScript that runs when Gradio mounts the part, even if the stage has mounted it.
    """

    name: str
    template: str
    script: str
    elem_id: str | None = None
    value: str = ""
    after: str = ""

    @property
    def adopting(self) -> str:
        """JavaScript that takes the part from the stage (ui/static/page/ahead.js) or else mounts it."""
        place = f"'{self.name}', element{', server' if self.value else ''}"
        return f"if (!Bass.adopt({place})) {{ {self.script}; }} {self.after}"


def parts(
    offers: list[dict[str, str]],
    made: Mapping[str, str | None] | None = None,
    own: dict[str, Any] | None = None,
) -> tuple[Part, ...]:
    """Return the parts that show a race, in their order on the page.

    Args:
        offers: name, title and look_for of each recording that the visitor can choose.
        made: the version and the revision that run the visitor's own races, if there are any.
        own: this machine's entry in the slider over readers (ui/sweep/readers.py).
    """
    tape = "Bass.mountTape(element, props, server); Bass.mountFiles(element)"
    offered = text({"offers": offers, "known": known(), "made": made})
    return (
        Part("lanes", race.lanes(), "Bass.mountLanes(element); Bass.mountBet(element)"),
        Part("tape", TEMPLATE, tape, "tape", offered, after="Bass.mountLinks(element, props)"),
        Part("readers", readers.template(own), "Bass.mountReaders(element)", "readers"),
        Part("inspector", race.inspector(), "Bass.mountInspector(element); Bass.mountWhy(element)"),
    )


def known() -> dict[str, Any]:
    """Return what this version adds to a recording that the browser opens."""
    return {
        "format": FORMAT,
        "looks": looks(list(METHODS)),
        "keywords": keywords(),
        "reference": reference(),
    }


def header(more: str) -> str:
    """Return the head of the page, ending with the HTML `more`, and the explanations that its words open."""
    return (
        f'<header class="bass-header"><h1>BASS</h1><p><a href="{PAPER}" target="_blank" rel="noopener">Batched '
        "speculative decoding</a>: a small model guesses the next words; the large one checks several in one step."
        f"</p>{more}</header>"
        f"{formulas.template()}"
    )


def build(
    offers: Mapping[str, RecordingOffer], below_lanes: Callable[[], object], own: dict[str, Any] | None = None
) -> dict[Part, gr.HTML]:
    """Add the parts to the current layout, and call `below_lanes` after the first one; `own` as in `parts`.

    A server function sends the recordings, outside Gradio's queue.
    """

    # A new function each time, because Gradio sets attributes on it.
    def recording(name: object) -> Response:
        if not isinstance(name, str) or name not in offers:
            return Response(status_code=404)
        headers = {"Content-Encoding": "gzip"}
        return Response(offers[name].packed, media_type="application/json", headers=headers)

    shown = [{"name": offer.name, "title": offer.title, "look_for": offer.look_for} for offer in offers.values()]
    components: dict[Part, gr.HTML] = {}
    for i, part in enumerate(parts(shown, {"version": __version__, "revision": revision()}, own)):
        if i == 1:
            below_lanes()
        more = {"value": part.value, "server_functions": [recording]} if part.value else {}
        components[part] = assets.part(part.template, part.adopting, part.elem_id, **more)
    return components
