"""The recordings' part of the page: which are offered, what is being shown, and the slider over a run's time.

Contract: static HTML, which recordings.js and scrubber.js fill; titles reach it as data. A recording is handed to
the browser by a server function, which takes no place in the queue, and is played there.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from ui.page import assets
from ui.race.feed import text
from ui.recordings.shelf import Offer

TEMPLATE = """<div class="bass-tape">
<section class="recordings" aria-label="Recorded races" hidden>
<p>Watch a recorded race, without waiting for the device:</p><div class="recordings-list"></div></section>
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
    """The components, in the current layout."""

    # Gradio marks the function that it is given.
    def recording(name: object) -> Response:
        if not isinstance(name, str) or name not in offers:
            return Response(status_code=404)
        headers = {"Content-Encoding": "gzip"}
        return Response(offers[name].packed, media_type="application/json", headers=headers)

    shown = [{"name": one.name, "title": one.title, "look_for": one.look_for} for one in offers.values()]
    mount = "Bass.mountTape(element, props, server)"
    assets.part(TEMPLATE, mount, "tape", value=text(shown), server_functions=[recording])
    assets.part(SCRUBBER, "Bass.mountScrubber(element)", "scrubber")
