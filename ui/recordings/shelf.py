"""The recordings that a page offers: those that ship with this program, or one that the operator names.

Contract: SHIPPED says what each shows; their files, made by `python -m bench record`, are read when first asked
for. Nothing here runs a model.
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


def _shipped(name: str, title: str, look_for: str) -> Offer:
    return Offer(name, title, look_for, FOLDER / f"{name}.json.xz")


SHIPPED = {
    offer.name: offer
    for offer in (
        _shipped(
            "win",
            "A win",
            "The preset Wins, recorded on a CPU: nearly every draft is accepted, since the answer stands in "
            "the prompt.",
        ),
        _shipped(
            "loss",
            "A loss",
            "The preset Loses, recorded on a CPU: at this temperature most drafts are rejected, and "
            "drafting takes its time all the same.",
        ),
        _shipped(
            "h100",
            "A simulated H100",
            "The preset On an H100: a small model wrote the texts, and the times are predicted for 7.8B and 310M "
            "on an H100, where BASS wins at batch 8 too.",
        ),
    )
    if offer.path.is_file()
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
