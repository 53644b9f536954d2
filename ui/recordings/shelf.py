"""The recordings that a page offers, those that ship or one that the operator names, and their part of the page.

Contract: SHIPPED says what each shows; their files, made by `python -m bench record`, are read when first asked
for. The part is static HTML, which recordings.js fills; titles reach it as data. A recording is handed to the
browser by a server function, outside of Gradio's queue, and is played there. Nothing here runs a model.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.responses import Response

from bass_core import BassError
from ui.page import assets
from ui.race.feed import text
from ui.recordings.recording import Recording, load

FOLDER = Path(__file__).resolve().parent / "shipped"


@dataclass(frozen=True)
class Offer:
    """A recording by its name: `title` is on its button, `look_for` says what to look for."""

    name: str
    title: str
    look_for: str
    path: Path

    @cached_property
    def recording(self) -> Recording:
        """The race, from its file; raises BassError."""
        return load(self.path)

    @cached_property
    def packed(self) -> bytes:
        """The recording as JSON, packed by gzip."""
        return gzip.compress(json.dumps(self.recording, separators=(",", ":")).encode(), 6, mtime=0)


SHIPPED = {
    name: Offer(name, title, look_for, path)
    for name, title, look_for in (
        (
            "win",
            "A win",
            "The preset Wins, recorded on a CPU: nearly every draft is accepted, and BASS serves four rows at "
            "once.",
        ),
        (
            "loss",
            "A loss",
            "The preset Loses, recorded on a CPU: at this temperature most drafts are rejected, and "
            "drafting takes its time all the same.",
        ),
        (
            "h100",
            "A simulated H100",
            "The preset On an H100: a small model wrote the texts, and the times are predicted for 7.8B and 310M "
            "on an H100, where BASS wins at batch 8 too.",
        ),
    )
    if (path := FOLDER / f"{name}.json.xz").is_file()
}


def asked(replay: str) -> dict[str, Offer]:
    """What --replay offers: "" all that ship, one of these by its name, or a file. Raises BassError."""
    if not replay:
        if not SHIPPED:
            raise BassError("No recordings ship with this copy: name a file, --replay FILE.")
        return SHIPPED
    if replay in SHIPPED:
        return {replay: SHIPPED[replay]}
    path = Path(replay)
    offer = Offer("file", path.name, "", path)
    offer.recording  # refused now, not when it is asked for  # noqa: B018
    return {offer.name: offer}


TEMPLATE = """<div class="bass-tape">
<section class="recordings" aria-label="Recorded races" hidden>
<p>Recorded races:</p><div class="recordings-list"></div></section>
<div class="recording-note" hidden><p class="recording-mark">Recording</p>
<p class="recording-about" role="status"></p>
<button type="button" class="action" data-back hidden>Back to your race</button></div></div>"""
# Of its own, so that it alone stays in sight.
SCRUBBER = """<div class="bass-tape"><div class="scrubber" role="group" aria-label="Go back in the race" hidden>
<button type="button" class="action" data-tape="play">Play</button>
<input type="range" min="0" max="0" value="0" step="any" aria-label="Time of the race, on this machine"
title="Drag, or use the arrow keys, to see any instant of the race">
<span class="tape-time"></span>
<button type="button" class="action" data-tape="live">Live</button></div></div>"""


def panel(offers: Mapping[str, Offer]) -> None:
    """The recordings and the slider over a run's time, in the current layout."""

    # Gradio marks the function that it is given.
    def recording(name: object) -> Response:
        if not isinstance(name, str) or name not in offers:
            return Response(status_code=404)
        headers = {"Content-Encoding": "gzip"}
        return Response(offers[name].packed, media_type="application/json", headers=headers)

    shown = [{"name": one.name, "title": one.title, "look_for": one.look_for} for one in offers.values()]
    mount = "Bass.mountTape(element, props, server)"
    assets.part(SCRUBBER, "Bass.mountScrubber(element)", "scrubber")
    assets.part(TEMPLATE, mount, "tape", value=text(shown), server_functions=[recording])
