"""A recorded race: its format, how to make one (`record`, `save`) and how to read one (`load`).

A recording contains everything that the page received during a race, as a JSON object:

    recording  FORMAT
    about      models, device and versions, in words
    made       the same by name: date, command, ... ("" or {} if not known)
    head       the first line of the page's log (ui/race/feed.py)
    snapshots  in order, each {"lines": the lines it added to the log; "view": the figures, without "run";
               "cache": the lanes' caches, if they changed}
    charts     the charts' series at the end
    ended      how the race ended: "done", "stopped" or "error"

ui/static/race/tape.js plays recordings, and saves a race that the page has shown in the same format. `load`
refuses a file that the scripts could not draw. It checks that references to rows, tokens and drafts are valid, not
whether the figures are true.
"""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.request import keywords
from ui.race.feed import PageFeed
from ui.race.looks import looks, reference

FORMAT = 6
# Parts of the head that depend on this version of the page, not on the race. `load` adds them.
ADDED = ("looks", "keywords", "reference")
UNNAMED = "recorded on an unnamed machine"
ENDS = ("done", "stopped", "error")
# The most rows that a recording may have, more than any page could draw.
MAX_ROWS = 4096
ORIGINS = ("s", "a", "r", "b", "+")
KINDS = ("prefill", "plain", "verify")
NUMBERS = ("p", "q", "u", "chance")
# Exceptions that the checks raise for a part of the wrong shape.
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError)

Recording = dict[str, Any]


def record(
    snapshots: Iterable[Snapshot],
    about: str,
    *,
    settings: Mapping[str, Any] | None = None,
    made: Mapping[str, Any] | None = None,
    pair: Mapping[str, Any] | None = None,
) -> Recording:
    """Return the recording of these snapshots. Snapshots without lanes are left out.

    Args:
        about: models, device and versions, in words.
        settings: the settings of the race (RaceRequest.settings).
        made: the same as `about`, by name.

    Raises:
        ValueError: if no snapshot has lanes.
    """
    recorder = Recorder(settings, pair)
    for snapshot in snapshots:
        recorder.add(snapshot)
    return recorder.recording(about, made)


class Recorder:
    """Records a race snapshot by snapshot. `record` explains the arguments."""

    def __init__(self, settings: Mapping[str, Any] | None = None, pair: Mapping[str, Any] | None = None) -> None:
        self.feed = PageFeed("", settings or {}, pair)
        self.shown: list[dict[str, Any]] = []
        self.cache: Any = None
        self.charts: dict[str, Any] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Record a snapshot, unless it has no lanes."""
        if not snapshot["lanes"]:  # costs are being measured
            return
        _, view, drawn = self.feed.update(snapshot)
        self.charts = json.loads(drawn)
        instant = {"lines": [json.loads(self.feed.lines[-1])], "view": json.loads(view)}
        del instant["view"]["run"]
        if self.charts["cache"] != self.cache:
            instant["cache"] = self.cache = self.charts["cache"]
        self.shown.append(instant)

    def recording(self, about: str, made: Mapping[str, Any] | None = None) -> Recording:
        """Return the recording. Raises ValueError if no snapshot had lanes."""
        if not self.shown:
            raise ValueError("no snapshot has lanes")
        charts = {name: part for name, part in self.charts.items() if name not in ("run", "cache")}
        head = json.loads(json.dumps(self.feed.head))
        return {
            "recording": FORMAT, "about": about, "made": dict(made or {}), "head": head, "snapshots": self.shown,
            "charts": charts, "ended": "done",
        }  # fmt: skip


def save(recording: Recording, path: Path) -> int:
    """Write a recording to a file, compressed with xz. Return its size in bytes."""
    packed = json.dumps(recording, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(lzma.compress(packed, preset=lzma.PRESET_DEFAULT | lzma.PRESET_EXTREME))


def load(path: Path) -> Recording:
    """Read a recording: JSON, which may be compressed with gzip or xz, or a saved page (webpage.py).

    Lanes get the looks of this version of the page.

    Raises:
        BassError: if the file can't be read or drawn.
    """
    try:
        document = json.loads(_unpacked(_embedded(path.read_bytes())), parse_constant=_no_number)
    except OSError as error:
        raise BassError(f"Cannot read the recording {path.name}: {error.strerror or 'it is damaged'}.") from error
    except (EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error) as error:
        raise BassError(f"{path.name} is not a recording: it contains no JSON document.") from error
    if not isinstance(document, dict) or document.get("recording") != FORMAT:
        raise BassError(
            f'{path.name} is not a recording: it lacks "recording": {FORMAT}, which "Save as a page" on this page '
            "writes."
        )
    for part, check in PARTS.items():
        try:
            check(document)
        except SHAPE_ERRORS as error:
            raise BassError(f"{path.name} is not a recording: {part} cannot be drawn.") from error
    head = document["head"]
    known = {"looks": looks([*head["lanes"], reference()]), "keywords": keywords(), "reference": reference()}
    about = str(document.get("about") or UNNAMED)
    return document | {"about": about, "head": {"pair": {}, **head, **known}}


def _embedded(data: bytes) -> bytes:
    """Return the recording inside a page of webpage.py, and any other contents as they are."""
    if not data[:100].lstrip().lower().startswith(b"<!doctype html"):
        return data
    race = re.search(rb'<script type="text/plain" id="race">([^<]*)</script>', data)
    return base64.b64decode(race[1], validate=True) if race else data


def _unpacked(data: bytes) -> bytes:
    """Return the contents, decompressed if they start like gzip or xz."""
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    return lzma.decompress(data) if data.startswith(b"\xfd7zXZ") else data


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads but a browser does not."""
    raise ValueError(f"{name} is no number")


# The checks below walk through a recording as the scripts do. They raise one of SHAPE_ERRORS if the scripts could
# not draw it.


def _need(*conditions: object) -> None:
    """Raise ValueError unless all conditions are true."""
    if not all(conditions):
        raise ValueError("does not fit")


def _items(value: object) -> list[Any]:
    """Return the value if it is a list, else raise TypeError."""
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _number(*values: object) -> bool:
    """Return whether all values are numbers. JSON's true and false are not."""
    return all(type(value) in (int, float) for value in values)


def _numbers_or_none(values: object) -> bool:
    """Return whether this is a list of numbers and None."""
    return all(value is None or _number(value) for value in _items(values))


def _whole(*values: object) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _head(document: Recording) -> None:
    head = document["head"]
    _need(_texts(head["run"], *_items(head["lanes"])), isinstance(head["settings"], dict), head["lanes"])
    _need(_whole(head["batch_size"]), head["batch_size"] <= MAX_ROWS)
    # In the scripts, lanes are keys of objects and parts of selectors.
    _need(*(name != "__proto__" and not set(name) & set('"\\') for name in head["lanes"]))


def _snapshots(document: Recording) -> None:
    head, shots = document["head"], _items(document["snapshots"])
    written = {name: [0] * head["batch_size"] for name in head["lanes"]}
    _need(shots)
    for shot in shots:
        for line in _items(shot["lines"]):
            for name, update in line.items():
                _update(update, written[name])
        _view(shot["view"], head)


def _update(update: dict[str, Any], written: list[int]) -> None:
    """Check one lane's part of a line: rows must exist, and rounds refer to tokens, which `written` counts."""
    rows = {str(at): at for at in range(len(written))}
    for index, tokens in update["new"].items():
        at = rows[index]
        for origin, text, ms, token in _items(tokens):
            _need(origin in ORIGINS, _texts(text), _number(ms), type(token) is int)
            _need(origin != "+" or written[at])  # "+" adds to the previous token
            written[at] += origin != "+"
    _need(_number(update["clock_ms"]))
    for entry in _items(update["rounds"]):
        rows_of, lengths, prefill = _items(entry["rows"]), _items(entry["lengths"]), entry["kind"] == "prefill"
        _need(
            entry["kind"] in KINDS,
            _whole(entry["round"], entry["draft_length"], *lengths),
            _number(entry["time_ms"]),
        )
        _need(
            _numbers_or_none([entry["draft_ms"], entry["verify_ms"]]),
            prefill or not lengths or len(lengths) == len(rows_of),
        )
        for row in rows_of:
            _row(written, row)


def _row(written: list[int], row: dict[str, Any]) -> None:
    """Check one row of a round: it must refer to written tokens, and drafts only to earlier drafts."""
    drafts, texts = len(_items(row["drafted"])), row["drafted_text"]
    _need(*(_whole(row[name]) for name in ("sequence", "start", "written", "accepted", "one_by_one")))
    _need(isinstance(row.get("certain", False), bool))
    _need(row["accepted"] <= drafts, row["start"] + row["written"] <= written[row["sequence"]])
    _need(_whole(*row["drafted"]), texts is None or (len(texts) == drafts and _texts(*_items(texts))))
    _need(
        _numbers_or_none([row["next_p"]]),
        *(len(row[name]) == drafts and _numbers_or_none(row[name]) for name in NUMBERS),
    )
    parents, path, detail = row["parents"], row["path"], row["detail"]
    if parents is not None:
        _need(len(_items(parents)) == drafts, *(type(at) is int and -1 <= at < i for i, at in enumerate(parents)))
    if path is not None:
        _need(_whole(*_items(path)), *(at < drafts for at in path))
    if detail is not None:
        _detail(detail, drafts)


def _detail(detail: dict[str, Any], drafts: int) -> None:
    sources, probs, ending = _items(detail["sources"]), (detail["own_p"], detail["own_q"]), detail["ending"]
    _need(
        _texts(detail["rule"], *sources),
        len(sources) == drafts,
        *(column is None or _numbers_or_none(column) for column in probs),
    )
    if ending is not None:
        _need(_whole(ending["after"]), ending["draft"] is None or _whole(ending["draft"]))
        _need(_numbers_or_none([ending["mass"]]), _number(ending["reach"]))
        for token in _items(ending["top"]):
            _need(_whole(token["token"]), token["text"] is None or _texts(token["text"]), _number(token["p"]))
            _need(_numbers_or_none([token["q"], token["residual"]]))


def _view(view: dict[str, Any], head: dict[str, Any]) -> None:
    lanes, verdict = view["lanes"], view["verdict"]
    _need(isinstance(view["done"], bool), _number(view["elapsed_ms"]), isinstance(view["device"], dict))
    _need(verdict["head"] is None or _texts(verdict["head"]), _texts(*verdict["lanes"].values()))
    _need(lanes.keys() <= set(head["lanes"]))
    for lane in lanes.values():
        reasons = _items(lane["finish_reasons"])
        _need(
            *(text is None or _texts(text) for text in [lane["error"], *reasons]),
            len(reasons) <= head["batch_size"],
        )
        _need(isinstance(lane["metrics"], dict), _number(lane["clock_ms"]))
    for rows in (view.get("comparison") or {}).values():
        _need(len(_items(rows)) <= head["batch_size"], *(row is None or _whole(row["at"]) for row in rows))


def _charts(document: Recording) -> None:
    charts = document["charts"]
    groups = [charts["series"], *charts["lanes"].values(), *charts["rounds"].values()]
    _need(*(_numbers_or_none(column) for columns in groups for column in columns.values()))
    _need(isinstance(charts["device"], dict), document["ended"] in ENDS)


PARTS: dict[str, Callable[[Recording], None]] = {
    "its head": _head,
    "its snapshots": _snapshots,
    "its charts or its end": _charts,
}
