"""Contract: plays a recorded race on the page, at the pace at which it ran, marked as a recording.

A recording is a JSON file {"recording": 1, "about": "...", "snapshots": [...]}, its snapshots those of
bass_core.race; a name that ends in .xz is unpacked. "settings" (the fields of RaceRequest) may say what was
asked. Non-goals: making recordings; running a model.
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_core import BassError
from ui.limits import RaceRequest

# A pause between two snapshots is never longer than this: a stall of the recorded machine is no news.
LONGEST_PAUSE_S = 1.0
SNAPSHOT = {"done", "elapsed_ms", "lanes", "device"}
LANE = {"sequences", "metrics", "clock_ms", "finished", "error"}


@dataclass(frozen=True)
class Recording:
    """What a file holds; `about` says on what it was recorded."""

    about: str
    settings: dict[str, Any]
    snapshots: list[dict[str, Any]]

    def source(self, request: RaceRequest) -> Generator[dict[str, Any], None, None]:
        """The recorded snapshots, whatever is asked for; a generator as race_source's is."""
        before = 0.0
        for snapshot in self.snapshots:
            time.sleep(min(max(0.0, snapshot["elapsed_ms"] - before) / 1000, LONGEST_PAUSE_S))
            before = snapshot["elapsed_ms"]
            yield {**snapshot, "settings": self.settings}


def load_recording(path: Path) -> Recording:
    """Read a file. Raises BassError, one sentence, where it can't be read or is no recording."""
    try:
        data = path.read_bytes()
        document = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
    except OSError as error:
        raise BassError(f"Cannot read the recording {path.name}: {error.strerror}.") from error
    except (ValueError, lzma.LZMAError) as error:
        raise BassError(f"{path.name} is not a recording: it holds no JSON document.") from error
    if not isinstance(document, dict) or document.get("recording") != 1:
        raise BassError(f'{path.name} is not a recording: it lacks "recording": 1.')
    snapshots = document.get("snapshots")
    if not isinstance(snapshots, list) or not snapshots or not all(map(_is_snapshot, snapshots)):
        raise BassError(f"{path.name} is not a recording: its snapshots are missing or not those of a race.")
    settings = document.get("settings")
    about = str(document.get("about") or "recorded on an unnamed machine")
    return Recording(about, settings if isinstance(settings, dict) else {}, snapshots)


def _is_snapshot(value: object) -> bool:
    if not isinstance(value, dict) or not value.keys() >= SNAPSHOT:
        return False
    lanes = value["lanes"]
    return isinstance(lanes, dict) and bool(lanes) and all(lane.keys() >= LANE for lane in lanes.values())
