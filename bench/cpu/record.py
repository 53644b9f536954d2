"""`python -m bench record [NAME ...]`: make the recordings that ship with the page (ui/recordings/shipped).

Each is one race of the default pair, with RECORDINGS' settings and the page's number of threads. Before the race,
we measure all costs of rounds, as the page does while no race runs. We store the first race, whatever its outcome.
The file names the machine, the date, the versions and the command.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app import parse, set_threads
from bass_core import ModelPair, Snapshot, measure_ahead, race
from ui.page.choices import choices
from ui.page.form import starting_values
from ui.page.limits import Limits
from ui.page.presets import REPEAT, presets
from ui.page.request import RaceRequest, make_request
from ui.recordings.recording import record, save
from ui.recordings.shelf import FOLDER
from ui.sources.local import Local
from ui.sources.source import PairOptions

from ..report.report import command, device_name, parser, revision, table, versions

# The recording that needs a GPU. Its file holds the same race, made before this command could (read, not run).
GPU = "h200"
# The settings of each recording: a preset, and what differs from it.
RECORDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "win": (REPEAT, {}),
    "loss": ("Unrelated words", {}),
    "h100": ("On an H100", {}),
    "one": (REPEAT, {"batch_size": 1}),
    GPU: (REPEAT, {}),
}


def main(argv: list[str]) -> None:
    """Record, write, and print what came out."""
    cli = parser("record", __doc__ or "", "pair", "draft", "device")
    cli.set_defaults(device="cpu")
    cli.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(RECORDINGS)}; by default those of the device"
    )
    cli.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="the folder for the files")
    options = cli.parse_args(argv)
    if unknown := set(options.names) - set(RECORDINGS):
        cli.error(f"there is no recording {', '.join(sorted(unknown))}: choose of {', '.join(RECORDINGS)}")
    local = Local(PairOptions(options.pair, options.draft, device=options.device))
    pair = local.pair
    about_pair = local.facts(set_threads(parse(["--host", "127.0.0.1"]), os.environ))
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "command": re.sub(r" --out \S+", "", command()),
        "device": device_name(pair.device),
        "versions": versions(),
        "revision": revision(),
    }
    machine = f"{facts['device']}".rsplit(",", 1)[0]  # without the number of threads, which `about` already has
    about = f"{about_pair.about}; {machine}, {facts['date']}"
    rows = []
    for name in options.names or [name for name in RECORDINGS if (name == GPU) == (pair.device.type == "cuda")]:
        request = asked(pair, *RECORDINGS[name], options.quick)
        raced = recorded(pair, request)
        document = record(raced, about, settings=request.settings(), made=facts, pair=about_pair.pair)
        size = save(document, options.out / f"{name}.json.xz")
        for lane, last in document["snapshots"][-1]["view"]["lanes"].items():
            figures = {key: last["metrics"][key] for key in ("ms_per_token", "speedup", "acceptance_rate")}
            rows.append({"recording": name, "KB": round(size / 1000, 1), "lane": lane, **figures})
    print(table(rows))


def recorded(pair: ModelPair, request: RaceRequest) -> Iterator[Snapshot]:
    """Measure all costs, then yield the snapshots of one race."""
    for _ in measure_ahead(pair, request.batch_size):
        pass
    if pair.device.type != "cpu":
        # The first race captures its graphs.
        for _ in race(pair, **request.arguments()):
            pass
    yield from race(pair, **request.arguments())


def asked(pair: ModelPair, preset: str, changed: dict[str, Any], quick: bool) -> RaceRequest:
    """Return the request that the page would send for these settings, with few tokens if `quick`."""
    values = starting_values(presets()[preset], Limits(), choices(pair, "auto")) | changed
    return make_request(values | ({"max_new_tokens": 8} if quick else {}), Limits())
