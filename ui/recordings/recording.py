"""A recorded race: its one format, how it is made, and how a file is read and checked.

Contract: a recording is what the page got of a race, plain data that JSON holds: FORMAT under "recording", and

    about      who ran what: models, device, versions, in words
    made       more of the same by name: date, command, ... ("" or {} if not known)
    head       the first line of the page's log (ui/race/feed.py)
    snapshots  in their order, each {"lines": what it added to the log; "view": the figures, without "run";
               "cache": the lanes' caches, where they changed}
    charts     the charts' series at the end
    ended      how the race ended: "done", "stopped" or "error"

Everything that the page draws is drawn from these; ui/static/race/tape.js plays them, and makes the same of a race
that it has shown. `load` refuses with one sentence what the scripts could not draw: it looks at numbers for what
they point to (rows, tokens, drafts), not for whether they are true.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.request import keywords
from ui.race.feed import PageFeed
from ui.race.looks import looks, reference

FORMAT = 6
UNNAMED = "recorded on an unnamed machine"
ENDS = ("done", "stopped", "error")
ORIGINS = ("s", "a", "r", "b", "+")
KINDS = ("prefill", "plain", "verify")
NUMBERS = ("p", "q", "u", "chance")
# What a part of the wrong shape makes the code that reads it raise.
MISFITS = (AttributeError, LookupError, TypeError, ValueError)

Recording = dict[str, Any]


def record(
    snapshots: Iterable[Snapshot],
    about: str,
    *,
    settings: Mapping[str, Any] | None = None,
    made: Mapping[str, Any] | None = None,
    pair: Mapping[str, Any] | None = None,
) -> Recording:
    """The recording of these snapshots, of which those without lanes are left out.

    settings: the race's (RaceRequest.settings). pair: the arguments of load_pair for the page's snippet. Raises
    ValueError if no snapshot has lanes.
    """
    feed = PageFeed("", settings or {}, pair)
    shown: list[dict[str, Any]] = []
    cache: Any = None
    charts: dict[str, Any] = {}
    for snapshot in snapshots:
        if not snapshot["lanes"]:  # costs are being measured
            continue
        _, view, drawn = feed.update(snapshot)
        charts = json.loads(drawn)
        shown.append({"lines": [json.loads(feed.lines[-1])], "view": json.loads(view)})
        del shown[-1]["view"]["run"]
        if charts["cache"] != cache:
            shown[-1]["cache"] = cache = charts["cache"]
    if not shown:
        raise ValueError("no snapshot has lanes")
    del charts["run"], charts["cache"]
    head = json.loads(json.dumps(feed.head))
    return {
        "recording": FORMAT, "about": about, "made": dict(made or {}), "head": head, "snapshots": shown,
        "charts": charts, "ended": "done",
    }  # fmt: skip


def save(recording: Recording, path: Path) -> int:
    """Write a file, packed by xz; its bytes."""
    packed = json.dumps(recording, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(lzma.compress(packed, preset=lzma.PRESET_DEFAULT | lzma.PRESET_EXTREME))


def load(path: Path) -> Recording:
    """Read a file, which may be packed by gzip or xz; lanes look as this version of the page shows them.

    Raises BassError with one sentence if it can't be read or drawn.
    """
    try:
        document = json.loads(_unpacked(path.read_bytes()), parse_constant=_no_number)
    except OSError as error:
        raise BassError(f"Cannot read the recording {path.name}: {error.strerror or 'it is damaged'}.") from error
    except (EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error) as error:
        raise BassError(f"{path.name} is not a recording: it holds no JSON document.") from error
    if not isinstance(document, dict) or document.get("recording") != FORMAT:
        raise BassError(
            f'{path.name} is not a recording: it lacks "recording": {FORMAT}, which this page\'s "Save '
            'recording" writes.'
        )
    for part, check in PARTS.items():
        try:
            check(document)
        except MISFITS as error:
            raise BassError(f"{path.name} is not a recording: {part} cannot be drawn.") from error
    head = document["head"]
    known = {"looks": looks([*head["lanes"], reference()]), "keywords": keywords(), "reference": reference()}
    about = str(document.get("about") or UNNAMED)
    return document | {"about": about, "head": {"pair": {}, **head, **known}}


def _unpacked(data: bytes) -> bytes:
    """The file's contents, unpacked if it begins as gzip or xz does."""
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    return lzma.decompress(data) if data.startswith(b"\xfd7zXZ") else data


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads and a browser does not."""
    raise ValueError(f"{name} is no number")


# What follows walks through a recording as the scripts do, and raises one of MISFITS for what they could not draw.


def _need(*true: object) -> None:
    """Raise ValueError unless all of these are true."""
    if not all(true):
        raise ValueError("does not fit")


def _items(value: object) -> list[Any]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _number(*values: object) -> bool:
    """Whether these are numbers, which JSON's true and false are not."""
    return all(type(value) in (int, float) for value in values)


def _some(values: object) -> bool:
    """Whether this is a list of numbers, some of which may be missing."""
    return all(value is None or _number(value) for value in _items(values))


def _whole(*values: object) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _head(document: Recording) -> None:
    head = document["head"]
    _need(_texts(head["run"], *_items(head["lanes"])), isinstance(head["settings"], dict), head["lanes"])
    _need(_whole(head["batch_size"]))


def _snapshots(document: Recording) -> None:
    head, shots = document["head"], _items(document["snapshots"])
    written = {name: [0] * head["batch_size"] for name in head["lanes"]}
    _need(shots)
    for shot in shots:
        for line in _items(shot["lines"]):
            for name, news in line.items():
                _news(news, written[name])
        _view(shot["view"], head)


def _news(news: dict[str, Any], written: list[int]) -> None:
    """New tokens are of rows that are there, and rounds are of tokens that are; counts the tokens."""
    rows = {str(at): at for at in range(len(written))}
    for index, tokens in news["new"].items():
        at = rows[index]
        for origin, text, ms, token in _items(tokens):
            _need(origin in ORIGINS, _texts(text), _number(ms), type(token) is int)
            _need(origin != "+" or written[at])  # adds to the token before it
            written[at] += origin != "+"
    _need(_number(news["clock_ms"]))
    for one in _items(news["rounds"]):
        changed, lengths, reading = _items(one["rows"]), _items(one["lengths"]), one["kind"] == "prefill"
        _need(one["kind"] in KINDS, _whole(one["round"], one["draft_length"], *lengths), _number(one["time_ms"]))
        _need(_some([one["draft_ms"], one["verify_ms"]]), reading or not lengths or len(lengths) == len(changed))
        for row in changed:
            _row(written, row)


def _row(written: list[int], row: dict[str, Any]) -> None:
    """A row of a round points to tokens, and to drafts before each other."""
    drafts, texts = len(_items(row["drafted"])), row["drafted_text"]
    _need(*(_whole(row[name]) for name in ("sequence", "start", "written", "accepted", "one_by_one")))
    _need(row["accepted"] <= drafts, row["start"] + row["written"] <= written[row["sequence"]])
    _need(_whole(*row["drafted"]), texts is None or (len(texts) == drafts and _texts(*_items(texts))))
    _need(_some([row["next_p"]]), *(len(row[name]) == drafts and _some(row[name]) for name in NUMBERS))
    parents, path, detail = row["parents"], row["path"], row["detail"]
    if parents is not None:
        _need(len(_items(parents)) == drafts, *(type(at) is int and -1 <= at < i for i, at in enumerate(parents)))
    if path is not None:
        _need(_whole(*_items(path)), *(at < drafts for at in path))
    if detail is not None:
        _detail(detail, drafts)


def _detail(detail: dict[str, Any], drafts: int) -> None:
    sources, own, ending = _items(detail["sources"]), (detail["own_p"], detail["own_q"]), detail["ending"]
    _need(_texts(detail["rule"], *sources), len(sources) == drafts, *(one is None or _some(one) for one in own))
    if ending is not None:
        _need(_whole(ending["after"]), ending["draft"] is None or _whole(ending["draft"]))
        _need(_some([ending["mass"]]), _number(ending["reach"]))
        for one in _items(ending["top"]):
            _need(_whole(one["token"]), one["text"] is None or _texts(one["text"]), _number(one["p"]))
            _need(_some([one["q"], one["residual"]]))


def _view(view: dict[str, Any], head: dict[str, Any]) -> None:
    lanes, verdict = view["lanes"], view["verdict"]
    _need(isinstance(view["done"], bool), _number(view["elapsed_ms"]), isinstance(view["device"], dict))
    _need(verdict["head"] is None or _texts(verdict["head"]), _texts(*verdict["lanes"].values()))
    _need(lanes.keys() <= set(head["lanes"]))
    for lane in lanes.values():
        reasons = _items(lane["finish_reasons"])
        _need(
            *(one is None or _texts(one) for one in [lane["error"], *reasons]), len(reasons) <= head["batch_size"]
        )
        _need(isinstance(lane["metrics"], dict), _number(lane["clock_ms"]))


def _charts(document: Recording) -> None:
    charts = document["charts"]
    groups = [charts["series"], *charts["lanes"].values(), *charts["rounds"].values()]
    _need(*(_some(column) for columns in groups for column in columns.values()))
    _need(isinstance(charts["device"], dict), document["ended"] in ENDS)


PARTS: dict[str, Callable[[Recording], None]] = {
    "its head": _head,
    "its snapshots": _snapshots,
    "its charts or its end": _charts,
}
