"""`python -m bench gpu`: kernels, steps, lanes and races on one CUDA device, in one command of under nine minutes.

Contract: needs no network and no gradio; models are built from configs with random weights. Sections run in
processes of their own (processes.py). Every figure is appended at once to FOLDER/DEVICE-TIME.lines.jsonl, and the
document DEVICE-DATE-TIME.json beside it is rewritten after every section. An interrupted or terminated run still
writes its document and exits with status 1. A killed run leaves its lines, from which `--finish LINES` makes the
document on any machine. Without a GPU the same code runs on tiny models under Triton's interpreter: a dry run,
whose figures don't count and which leaves all claims about time undecided.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from ..report.report import command, device_name, parser, revision, show, versions
from . import results
from .plan import DEFAULT, MINUTES, SECTIONS
from .processes import run

ROOT = Path(__file__).parents[2]


def main(argv: list[str]) -> None:
    """Run, print, write."""
    arguments = _options().parse_args(argv)
    if arguments.finish:
        _finish(arguments, arguments.finish)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = _head(arguments, device)
    print(f"{head['device']}: " + ", ".join(f"{name} {one}" for name, one in head["versions"].items()), flush=True)
    if device.type == "cpu":
        print("No CUDA device: a dry run on tiny models. No figure in it counts.", flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    name = f"{results.file_name(head['device'])}-{head['date']}-{head['time']}.lines.jsonl"
    lines = arguments.results / name
    results.append(lines, kind="run", **head)
    print(f"Killed, this run can be ended with: python -m bench gpu --finish {lines}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(arguments, device, lines)
    except KeyboardInterrupt:
        _finish(arguments, lines)
        sys.exit(1)
    _finish(arguments, lines)
    lines.unlink()


def _options() -> ArgumentParser:
    options = parser("gpu", __doc__ or "")
    options.add_argument("--minutes", type=float, default=MINUTES, help="when to begin nothing new")
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(DEFAULT))
    options.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    options.add_argument("--recordings", type=Path, default=ROOT / "bench" / "recordings", metavar="FOLDER")
    options.add_argument("--finish", type=Path, metavar="LINES", help="make the document of a run that was killed")
    return options


def _head(arguments: Namespace, device: torch.device) -> dict[str, Any]:
    """The document's fields about the run itself."""
    found = versions()
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda)}
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "device": device_name(device),
        "dry": device.type == "cpu",
        "command": command(),
        "versions": found,
        "revision": revision(),
        "seed": arguments.seed,
        "quick": arguments.quick,
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H%M%S"),
        "sections": list(arguments.sections),
    }


def _finish(arguments: Namespace, path: Path) -> None:
    """Print tables, failures and claims, and write the document."""
    lines = results.read(path) if path.is_file() else []
    if not lines or lines[0].get("kind") != "run":
        sys.exit(f"{path} holds no run of this bench: name the .lines.jsonl file that it printed when it began.")
    results.print_tables(lines)
    written = results.write(lines, path.parent)
    if written:
        print(f"written: {written}")
    show(results.document(lines), arguments)
