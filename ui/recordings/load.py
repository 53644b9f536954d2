"""Reads a recorded race from a file, whichever of three kinds it is.

Contract: `load_recording` takes what "Save recording" saves (tape.py), {"recording": 1, "about", "snapshots"} with
the snapshots of bass_core's `race` and perhaps their "settings" (RaceRequest.settings), and the JSON of the page's
"Download JSON" (exported.py); each as it is, or packed by gzip or xz. Anything else is refused with one sentence.
Non-goals: making recordings; running a model.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.request import keywords
from ui.race.feed import RecordedSnapshot
from ui.race.looks import looks, reference
from ui.recordings.check import fault
from ui.recordings.exported import ABOUT, snapshots_of
from ui.recordings.tape import FORMAT, Document, tape
from ui.sources.waiting import WITHOUT_LANES

SNAPSHOT = {"done", "elapsed_ms", "lanes", "device"}
LANE = {"sequences", "metrics", "clock_ms", "finished", "error"}
UNNAMED = "recorded on an unnamed machine"
# What a document of the wrong shape makes the code that reads it raise.
MISFITS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Recording:
    """A recorded race: `about` names the machine and the models, `document` is what the page plays (tape.py)."""

    about: str
    document: Document


def load_recording(path: Path) -> Recording:
    """Read a file. Raises BassError with one sentence if it can't be read or is no recording."""
    try:
        document = json.loads(_unpacked(path.read_bytes()), parse_constant=_no_number)
    except OSError as error:
        raise BassError(f"Cannot read the recording {path.name}: {error.strerror or 'it is damaged'}.") from error
    except (EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error) as error:
        raise BassError(f"{path.name} is not a recording: it holds no JSON document.") from error
    if not isinstance(document, dict):
        document = {}
    about = str(document.get("about") or UNNAMED)
    if document.get("recording") == FORMAT:
        return Recording(about, _taped(path.name, document))
    if document.get("recording") == 1:
        return Recording(about, _from_snapshots(path.name, document, about))
    if document.get("run") == 1:
        return Recording(ABOUT, _from_export(path.name, document))
    raise BassError(
        f'{path.name} is not a recording: it lacks "recording": 1 or {FORMAT}, and is no JSON export of the page.'
    )


def _unpacked(data: bytes) -> bytes:
    """The file's contents, unpacked if it begins as gzip or xz does."""
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    return lzma.decompress(data) if data.startswith(b"\xfd7zXZ") else data


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads and a browser does not."""
    raise ValueError(f"{name} is no number")


def _taped(name: str, document: dict[str, Any]) -> Document:
    """A tape, with what this version of the page knows of lanes and settings."""
    wrong = fault(document)
    if wrong is not None:
        raise BassError(f"{name} is not a recording: {wrong} cannot be drawn.")
    head = document["head"]
    known = {"looks": looks([*head["lanes"], reference()]), "keywords": keywords(), "reference": reference()}
    return document | {"head": {"pair": {}, **head, **known}}


def _from_snapshots(name: str, document: dict[str, Any], about: str) -> Document:
    snapshots, settings = document.get("snapshots"), document.get("settings")
    wrong = f"{name} is not a recording: its snapshots are missing or not those of a race."
    if not isinstance(snapshots, list) or not all(map(_is_snapshot, snapshots)):
        raise BassError(wrong)
    given = settings if isinstance(settings, dict) else {}
    try:
        return tape(_with(given, snapshots), about)
    except MISFITS as error:
        raise BassError(wrong) from error


def _from_export(name: str, document: dict[str, Any]) -> Document:
    try:
        pair = document.get("pair")
        made = tape(snapshots_of(document), ABOUT, pair=pair if isinstance(pair, dict) else None)
    except MISFITS as error:
        raise BassError(f"{name} is not a recording: its lanes are not those of a page's JSON export.") from error
    wrong = fault(json.loads(json.dumps(made)))
    if wrong is not None:
        raise BassError(f"{name} is not a recording: {wrong} cannot be drawn.")
    return made


def _with(settings: dict[str, Any], snapshots: list[Snapshot]) -> Iterator[Snapshot]:
    for snapshot in snapshots:
        yield RecordedSnapshot(**snapshot, settings=settings)


def _is_snapshot(value: object) -> bool:
    if not isinstance(value, dict) or not value.keys() >= SNAPSHOT:
        return False
    lanes = value["lanes"]
    if not isinstance(lanes, dict) or not isinstance(value["elapsed_ms"], int | float):
        return False
    # There are no lanes yet while costs are measured, or no worker is free.
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
