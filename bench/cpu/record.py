"""`python -m bench record [NAME ...]`: make the recordings that ship with the page (ui/recordings/shipped).

Contract: each is one race of the default pair, with a preset's settings and the page's number of threads, after
the costs of rounds were measured in full, as the page does while nothing runs. Nothing is chosen: the first race
is stored, whatever came out. The file says who made it, when, with which versions and with which command.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from app import parse, set_threads
from bass_core import ModelPair, Snapshot, measure_ahead, race
from ui.page.choices import choices
from ui.page.form import starting
from ui.page.limits import Limits
from ui.page.presets import presets
from ui.page.request import RaceRequest, make_request
from ui.recordings.recording import record, save
from ui.recordings.shelf import FOLDER
from ui.sources.local import Local
from ui.sources.source import Ask

from ..report.report import command, device_name, parser, revision, table, versions

# The preset whose settings each recording has.
RECORDINGS = {"win": "Wins", "loss": "Loses", "h100": "On an H100"}


def main(argv: list[str]) -> None:
    """Record, write, and print what came out."""
    made = parser("record", __doc__ or "", "pair", "draft")
    made.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(RECORDINGS)}; without, all")
    made.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where the files go")
    options = made.parse_args(argv)
    if unknown := set(options.names) - set(RECORDINGS):
        made.error(f"there is no recording {', '.join(sorted(unknown))}: choose of {', '.join(RECORDINGS)}")
    local = Local(Ask(options.pair, options.draft, device="cpu"))
    pair = local.pair
    told = local.facts(set_threads(parse(["--host", "127.0.0.1"]), os.environ))
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "command": re.sub(r" --out \S+", "", command()),
        "device": device_name(pair.device),
        "versions": versions(),
        "revision": revision(),
    }
    machine = f"{facts['device']}".rsplit(",", 1)[0]  # without its threads, which stand before it
    about = f"{told.about}; {machine}, {facts['date']}"
    rows = []
    for name in options.names or RECORDINGS:
        request = asked(pair, RECORDINGS[name], options.quick)
        raced = recorded(pair, request)
        document = record(raced, about, settings=request.settings(), made=facts, pair=told.pair)
        size = save(document, options.out / f"{name}.json.xz")
        for lane, last in document["snapshots"][-1]["view"]["lanes"].items():
            figures = {key: last["metrics"][key] for key in ("ms_per_token", "speedup", "acceptance_rate")}
            rows.append({"recording": name, "KB": round(size / 1000, 1), "lane": lane, **figures})
    print(table(rows))


def recorded(pair: ModelPair, request: RaceRequest) -> Iterator[Snapshot]:
    """The snapshots of one race."""
    for _ in measure_ahead(pair, request.batch_size):
        pass
    yield from race(pair, **request.arguments())


def asked(pair: ModelPair, preset: str, quick: bool) -> RaceRequest:
    """What the page's form would send after a click on the preset; few tokens if `quick`."""
    values = starting(presets()[preset], Limits(), choices(pair, "auto"))
    return make_request(values | ({"max_new_tokens": 8} if quick else {}), Limits())
