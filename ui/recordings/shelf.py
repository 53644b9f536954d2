"""The recordings that a page offers, and their part of the page. Nothing here runs a model.

SHIPPED lists the recordings that ship; `python -m bench record` makes their files, which are read on first use.
The HTML is static, and recordings.js fills it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bass_core import BassError
from ui.recordings.recording import Recording, load

FOLDER = Path(__file__).resolve().parent / "shipped"


@dataclass(frozen=True)
class RecordingOffer:
    """A recording that the page offers.

    Attributes:
        name: identifies it.
        title: the text of its button.
        look_for: a hint for the viewer, in one sentence.
        path: its file.
    """

    name: str
    title: str
    look_for: str
    path: Path

    @cached_property
    def recording(self) -> Recording:
        """The recording, read from its file. Raises BassError."""
        return load(self.path)

    @cached_property
    def packed(self) -> bytes:
        """The recording as JSON, compressed with gzip."""
        return gzip.compress(json.dumps(self.recording, separators=(",", ":")).encode(), 6, mtime=0)


SHIPPED = {
    name: RecordingOffer(name, title, look_for, path)
    for name, title, look_for in (
        (
            "win",
            "A win",
            "The preset Repeat a text: nearly every draft is accepted, and BASS serves four rows at once.",
        ),
        (
            "loss",
            "A loss",
            "The preset Unrelated words: at this temperature most drafts are rejected, but "
            "drafting them still takes time.",
        ),
        (
            "h100",
            "A simulated H100",
            "The preset On an H100: a small model wrote the texts, but the times are predicted for 7.8B and 310M "
            "on an H100, where BASS wins at batch 8 too.",
        ),
        (
            "h200",
            "An H200",
            "The preset Repeat a text, measured on a GPU: a step of so small a model takes a millisecond, and "
            "BASS still wins.",
        ),
        (
            "one",
            "One reader",
            "The preset Repeat a text with one row: one after another and all at once are the same, and both save "
            "steps.",
        ),
    )
    if (path := FOLDER / f"{name}.json.xz").is_file()
}


def requested_recordings(replay: str) -> dict[str, RecordingOffer]:
    """Return the recordings for an argument of --replay.

    Args:
        replay: "" for all that ship, the name of one of these, or a file.

    Raises:
        BassError: if there is no such recording, or it can't be read.
    """
    if not replay:
        if not SHIPPED:
            raise BassError("No recordings ship with this copy: name a file, --replay FILE.")
        return SHIPPED
    if replay in SHIPPED:
        return {replay: SHIPPED[replay]}
    path = Path(replay)
    offer = RecordingOffer("file", path.name, "", path)
    offer.recording  # read it now, so that a bad file is refused at once  # noqa: B018
    return {offer.name: offer}


TEMPLATE = """<div class="bass-tape">
<section class="recordings" aria-label="Recorded races" hidden>
<p>Recorded:</p><div class="recordings-list"></div>
<label class="action">Open… <input type="file" class="spoken" accept=".html,.json,.gz"
aria-label="Open a saved race"></label></section>
<div class="recording-note" hidden><p class="recording-mark">Recording</p>
<p class="recording-about" role="status"></p>
<button type="button" class="action" data-back hidden>Back to your race</button></div></div>"""
