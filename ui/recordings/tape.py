"""A recorded race as the page plays it, made from a race's snapshots.

Contract: `tape` gives a document, plain data that JSON holds: FORMAT under "recording", and

    about   who ran what: models, device, versions, in words
    made    more of the same by name: date, command, ... ("" or {} if not known)
    head    the first line of the page's log (ui/race/feed.py)
    lines   its other lines, one a snapshot
    shown   what the page showed at instants of the race, in their order, each {"lines": how many lines had come,
            "view": the figures, without "run"; "cache": the lanes' caches, where they changed}
    charts  the charts' series at the end
    ended   how the race ended: "done", "stopped" or "error"

ui/static/race/tape.js plays such a document and makes one of a race that it has shown. Everything that the page
draws is drawn from these. Non-goals: reading files (load.py), checking a document (check.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bass_core import Snapshot
from ui.page.limits import Limits
from ui.page.request import make_request
from ui.race.feed import PageFeed

FORMAT = 3
# A recorded race has its own settings; the feed is given a request that passes the checks.
PLAYED = {"prompt": "a recording"}

Document = dict[str, Any]


def tape(
    snapshots: Iterable[Snapshot],
    about: str,
    *,
    made: Mapping[str, Any] | None = None,
    pair: Mapping[str, Any] | None = None,
) -> Document:
    """The document of these snapshots, which may be RecordedSnapshots with their settings.

    `pair`: the arguments of load_pair for the page's snippet. Raises ValueError without a snapshot that has lanes,
    and whatever the feed raises for a snapshot that it can't read.
    """
    feed = PageFeed("", make_request(PLAYED, Limits()), pair)
    lines: list[Any] = []
    shown: list[dict[str, Any]] = []
    cache: Any = None
    charts: dict[str, Any] = {}
    length = 0
    for snapshot in snapshots:
        if not snapshot["lanes"]:  # costs are being measured
            continue
        log, view, drawn = feed.update(snapshot)
        added = [json.loads(line) for line in log[length:].split("\n") if line]
        if not length:
            head = added.pop(0)
        length = len(log)
        lines += added
        charts = json.loads(drawn)
        one = {"lines": len(lines), "view": json.loads(view)}
        del one["view"]["run"]
        if charts["cache"] != cache:
            one["cache"] = cache = charts["cache"]
        shown.append(one)
    if not shown:
        raise ValueError("no snapshot has lanes")
    del charts["run"], charts["cache"]
    return {
        "recording": FORMAT, "about": about, "made": dict(made or {}), "head": head, "lines": lines,
        "shown": shown, "charts": charts, "ended": "done",
    }  # fmt: skip
