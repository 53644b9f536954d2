"""Plays a recorded race on the page, at its original pace and marked as a recording.

Contract: a recording is a JSON file {"recording": 1, "about": "...", "snapshots": [...]} with the snapshots of
bass_core's `race`; a name that ends in .xz is unpacked. "settings" (RaceRequest.settings) may say what was asked
for. Non-goals: making recordings; running a model.
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.race.feed import PageFeed, RecordedSnapshot
from ui.sources.waiting import WITHOUT_LANES

# The longest pause between two snapshots, in seconds: a stall of the recorded machine is cut to it.
LONGEST_PAUSE_S = 1.0
SNAPSHOT = {"done", "elapsed_ms", "lanes", "device"}
LANE = {"sequences", "metrics", "clock_ms", "finished", "error"}


@dataclass(frozen=True)
class Recording:
    """The contents of a file; `about` names the machine and the models."""

    about: str
    settings: dict[str, Any]
    snapshots: list[Snapshot]

    def source(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """The recorded snapshots; the request is ignored. A generator, like that of race_source."""
        before = 0.0
        for snapshot in self.snapshots:
            time.sleep(min(max(0.0, snapshot["elapsed_ms"] - before) / 1000, LONGEST_PAUSE_S))
            before = snapshot["elapsed_ms"]
            yield RecordedSnapshot(**snapshot, settings=self.settings)


def load_recording(path: Path) -> Recording:
    """Read a file. Raises BassError with one sentence if it can't be read or is no recording."""
    try:
        data = path.read_bytes()
        text = lzma.decompress(data) if path.suffix == ".xz" else data
        document = json.loads(text, parse_constant=_no_number)
    except OSError as error:
        raise BassError(f"Cannot read the recording {path.name}: {error.strerror}.") from error
    except (ValueError, RecursionError, lzma.LZMAError) as error:
        raise BassError(f"{path.name} is not a recording: it holds no JSON document.") from error
    if not isinstance(document, dict) or document.get("recording") != 1:
        raise BassError(f'{path.name} is not a recording: it lacks "recording": 1.')
    snapshots = document.get("snapshots")
    if not isinstance(snapshots, list) or not snapshots or not _can_be_shown(snapshots):
        raise BassError(f"{path.name} is not a recording: its snapshots are missing or not those of a race.")
    settings = document.get("settings")
    about = str(document.get("about") or "recorded on an unnamed machine")
    return Recording(about, settings if isinstance(settings, dict) else {}, snapshots)


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads and a browser does not."""
    raise ValueError(f"{name} is no number")


def _can_be_shown(snapshots: list[Any]) -> bool:
    """Whether the page can draw them: each is a race's snapshot, and the feed takes them in this order."""
    if not all(map(_is_snapshot, snapshots)):
        return False
    feed = PageFeed("", make_request({"prompt": "a recording"}, Limits()))
    try:
        for snapshot in snapshots:
            if snapshot["lanes"]:
                feed.update(snapshot)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return False
    return True


def _is_snapshot(value: object) -> bool:
    if not isinstance(value, dict) or not value.keys() >= SNAPSHOT:
        return False
    lanes = value["lanes"]
    if not isinstance(lanes, dict) or not isinstance(value["elapsed_ms"], int | float):
        return False
    # There are no lanes yet while costs are measured, or a race waits for a worker.
    if not lanes and value.get("phase") not in WITHOUT_LANES:
        return False
    return all(isinstance(lane, dict) and lane.keys() >= LANE for lane in lanes.values()) and _is_comparison(
        value.get("comparison", {}), lanes
    )


def _is_comparison(value: object, lanes: dict[str, Any]) -> bool:
    """Whether it is {lane: [None or {"at": index, ...}, one for each of the lane's rows]}."""
    return isinstance(value, dict) and all(
        isinstance(rows, list)
        and name in lanes
        and len(rows) == len(lanes[name]["sequences"])
        and all(row is None or (isinstance(row, dict) and type(row.get("at")) is int) for row in rows)
        for name, rows in value.items()
    )
