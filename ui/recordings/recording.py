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

FORMAT = 4
UNNAMED = "recorded on an unnamed machine"
ENDS = ("done", "stopped", "error")
ORIGINS = ("s", "a", "r", "b", "+")
KINDS = ("pr", "pl", "ve")
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
    head: Any = None
    cache: Any = None
    charts: dict[str, Any] = {}
    length = 0
    for snapshot in snapshots:
        if not snapshot["lanes"]:  # costs are being measured
            continue
        log, view, drawn = feed.update(snapshot)
        lines = [json.loads(line) for line in log[length:].split("\n") if line]
        head, length = head or lines.pop(0), len(log)
        charts = json.loads(drawn)
        shown.append({"lines": lines, "view": json.loads(view)})
        del shown[-1]["view"]["run"]
        if charts["cache"] != cache:
            shown[-1]["cache"] = cache = charts["cache"]
    if not shown:
        raise ValueError("no snapshot has lanes")
    del charts["run"], charts["cache"]
    return {
        "recording": FORMAT, "about": about, "made": dict(made or {}), "head": head, "snapshots": shown,
        "charts": charts, "ended": "done",
    }  # fmt: skip


def save(recording: Recording, path: Path) -> int:
    """Write a file, packed by xz; its bytes."""
    text = json.dumps(recording, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(lzma.compress(text.encode(), preset=lzma.PRESET_DEFAULT | lzma.PRESET_EXTREME))


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
    for part, fits in PARTS.items():
        if not _fits(fits, document):
            raise BassError(f"{path.name} is not a recording: {part} cannot be drawn.")
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


# What follows walks through a recording as the scripts do: it says whether a part fits, or raises one of MISFITS.


def _fits(check: Callable[[Recording], bool], document: Recording) -> bool:
    try:
        return check(document)
    except MISFITS:
        return False


def _items(value: Any) -> list[Any]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _number(*values: Any) -> bool:
    """Whether these are numbers, which JSON's true and false are not."""
    return all(type(value) in (int, float) for value in values)


def _some(values: Any) -> bool:
    """Whether this is a list of numbers, some of which may be missing."""
    return all(value is None or _number(value) for value in _items(values))


def _whole(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _head(document: Recording) -> bool:
    head = document["head"]
    plain = _texts(head["run"], *_items(head["lanes"])) and isinstance(head["settings"], dict)
    return plain and _whole(head["batch_size"]) and bool(head["lanes"])


def _snapshots(document: Recording) -> bool:
    head, shots = document["head"], _items(document["snapshots"])
    written = {name: [0] * head["batch_size"] for name in head["lanes"]}
    for shot in shots:
        for line in _items(shot["lines"]):
            if not all(_news(news, written[name]) for name, news in line.items()):
                return False
        if not _view(shot["view"], head):
            return False
    return bool(shots)


def _news(news: dict[str, Any], written: list[int]) -> bool:
    """Whether new tokens are of rows that are there, and rounds are of tokens that are; counts the tokens."""
    rows = {str(at): at for at in range(len(written))}
    for index, tokens in news["new"].items():
        at = rows[index]
        for origin, text, ms, token in _items(tokens):
            if origin not in ORIGINS or not _texts(text) or not _number(ms) or type(token) is not int:
                return False
            if origin == "+" and not written[at]:  # adds to the token before it
                return False
            written[at] += origin != "+"
    return _number(news["clock_ms"]) and all(_round(*one, written=written) for one in _items(news["rounds"]))


def _round(number: Any, kind: Any, lengths: Any, ms: Any, rows: Any, *spent: Any, written: list[int]) -> bool:
    each = isinstance(lengths, list)
    fits = _whole(number, *(lengths if each else [lengths])) and kind in KINDS and _number(ms)
    fits = fits and (not each or len(lengths) == len(_items(rows)))
    known = not spent or (len(spent) == 1 and _number(*spent[0]) and len(spent[0]) == 2)
    return fits and known and all(_row(written, *row) for row in _items(rows))


def _row(
    written: list[int], index: Any, start: Any, count: Any, accepted: Any, next_p: Any, drafts: Any, alone: Any,
    parents: Any = None, path: Any = None, detail: Any = None,
) -> bool:  # fmt: skip
    """Whether a row of a round points to tokens, and to drafts before each other."""
    tested = len(_items(drafts))
    if not _whole(index, start, count, accepted, alone) or not _some([next_p]):
        return False
    if start + count > written[index] or accepted > tested:
        return False
    if not all(_texts(text) and _some(numbers) and len(numbers) == 4 for text, *numbers in drafts):
        return False
    if parents is not None and (
        len(_items(parents)) != tested
        or any(type(at) is not int or not -1 <= at < i for i, at in enumerate(parents))
    ):
        return False
    on_path = path is None or (_whole(*_items(path)) and all(at < tested for at in path))
    return on_path and (detail is None or _detail(*detail))


def _detail(rule: Any, sources: Any, own_p: Any, own_q: Any, ending: Any) -> bool:
    of_each = _texts(sources) or _texts(*_items(sources))
    return (
        _texts(rule)
        and of_each
        and all(own is None or _some(own) for own in (own_p, own_q))
        and (ending is None or _ending(*ending))
    )


def _ending(after: Any, draft: Any, mass: Any, reach: Any, top: Any) -> bool:
    said = _whole(after) and (draft is None or _whole(draft)) and _some([mass]) and _number(reach)
    return said and all(
        _whole(token) and (text is None or _texts(text)) and _number(p) and _some([q, residual])
        for token, text, p, q, residual in _items(top)
    )


def _view(view: dict[str, Any], head: dict[str, Any]) -> bool:
    lanes, verdict = view["lanes"], view["verdict"]
    said = verdict["head"] is None or _texts(verdict["head"])
    return (
        isinstance(view["done"], bool)
        and _number(view["elapsed_ms"])
        and isinstance(view["device"], dict)
        and said
        and _texts(*verdict["lanes"].values())
        and lanes.keys() <= set(head["lanes"])
        and all(_lane(lane, head["batch_size"]) for lane in lanes.values())
    )


def _lane(lane: dict[str, Any], rows: int) -> bool:
    reasons = _items(lane["finish_reasons"])
    told = all(one is None or _texts(one) for one in [lane["error"], *reasons])
    return isinstance(lane["metrics"], dict) and _number(lane["clock_ms"]) and told and len(reasons) <= rows


def _charts(document: Recording) -> bool:
    charts = document["charts"]
    groups = [charts["series"], *charts["lanes"].values(), *charts["rounds"].values()]
    drawn = all(_some(column) for columns in groups for column in columns.values())
    return drawn and isinstance(charts["device"], dict) and document["ended"] in ENDS


PARTS: dict[str, Callable[[Recording], bool]] = {
    "its head": _head,
    "its snapshots": _snapshots,
    "its charts or its end": _charts,
}
