"""`python -m bench workers`: races in this process beside the same races on a worker of Ray, by turns.

Contract: one pair, one thread and the same settings in both arms, which must write the same texts. ms per token
are those of the lanes' own clocks. The first snapshot and the snapshots a second are wall time, as for a page.
Needs requirements-ray.txt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bass_core import Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.cluster.place import on_this_machine
from ui.sources.local import Local
from ui.sources.source import Ask

from ..report.report import claim, finish, median, parser

BAR = 1.05


def main(argv: list[str]) -> None:
    """Race in both arms by turns, compare, print, and write."""
    options = parser("workers", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--draft", help="a folder with the draft model, instead of the pair's own")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--max-new-tokens", type=int, default=64)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.repeats, arguments.max_new_tokens = 2, 16
    torch.set_num_threads(1)
    ask = Ask(arguments.pair, arguments.draft, device="cpu", measures=False)
    given = {"prompt": "Write a haiku.", "batch_size": 2, "max_new_tokens": arguments.max_new_tokens}
    request = make_request(given | {"temperature": 0, "draft_length": 3}, Limits())
    place = on_this_machine(ask, Limits(), workers=1, threads=1)
    try:
        arms = {"in-process": Local(ask).alone, "Ray": place.source}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for repeat in range(arguments.repeats + 1):
            for name, source in arms.items():
                found = _race(source, request)
                if repeat:  # the first one warms up
                    runs[name].append(found)
    finally:
        place.close()
    results = [_row(name, found) for name, found in runs.items()]
    claims = [_ratio(lane, runs) for lane in runs["Ray"][0]["ms"]]
    same = all(one["texts"] == runs["in-process"][0]["texts"] for found in runs.values() for one in found)
    claims.append(claim("texts equal those in this process", float(same), "1.0", same))
    later = results[1]["first snapshot, ms"] - results[0]["first snapshot, ms"]
    claims.append(claim("ms by which the first snapshot comes later", later, "stored, no bar", None))
    finish("workers", arguments, torch.device("cpu"), results, claims)


def _race(source: Callable[[RaceRequest], Iterable[Snapshot]], request: RaceRequest) -> dict[str, Any]:
    start, first, count = time.perf_counter(), None, 0
    for snapshot in source(request):
        if snapshot["lanes"]:
            first, count = first or time.perf_counter() - start, count + 1
    lanes = snapshot["lanes"]
    return {
        "ms": {name: lane["metrics"]["ms_per_token"] for name, lane in lanes.items()},
        "first": 1000 * (first or 0.0),
        "rate": count / (time.perf_counter() - start),
        "texts": {name: [one["token_ids"] for one in lane["sequences"]] for name, lane in lanes.items()},
    }


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name}
    for lane in runs[0]["ms"]:
        row[f"{lane}, ms/token"] = median([one["ms"][lane] for one in runs])
    row["first snapshot, ms"] = median([one["first"] for one in runs])
    row["snapshots a second"] = median([one["rate"] for one in runs])
    return row


def _ratio(lane: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ray's ms per token over this process's, at most 1.05 or this process's own spread."""
    here, there = ([one["ms"][lane] for one in runs[name]] for name in ("in-process", "Ray"))
    ratio, bar = median(there) / median(here), max(BAR, max(here) / min(here))
    words = "1.05" if bar == BAR else f"{bar:.3f}, the spread of the repeats in this process"
    return claim(f"{lane}: ms/token on Ray over in-process", ratio, f"at most {words}", ratio <= bar)
