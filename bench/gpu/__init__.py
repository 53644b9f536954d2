"""`python -m bench gpu`: kernels, steps, lanes and races on one CUDA device, in one command of under nine minutes.

Contract: needs no network and no gradio; models are built from configs with random weights. Sections run in a
process of their own that is started anew when it dies, and every figure is kept as it comes: a section that fails
is named and loses no other. Without a GPU the same code runs on tiny models under Triton's interpreter; that is a
dry run, of which no figure counts and no claim is decided. Results go to bench/results/DEVICE-DATE.json as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from ..report import device_name, document, parser, show, table
from .claims import claims

ROOT = Path(__file__).parents[2]
SECTIONS = ("checks", "graphs", "roofline", "lanes", "races", "attention", "products", "smollm2", "compiled")
# The process that holds the large models runs these; the others have one each.
_TOGETHER = ("roofline", "lanes", "races")
_ORDER = (("checks",), ("graphs",), _TOGETHER, ("attention",), ("products",), ("smollm2",), ("compiled",))


def main(argv: list[str]) -> None:
    """Run, print, write."""
    options = parser("gpu", __doc__ or "")
    options.add_argument("--minutes", type=float, default=8.5, help="when to begin nothing new")
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    options.add_argument("--recordings", type=Path, default=ROOT / "bench" / "recordings")
    arguments = options.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("No CUDA device: a dry run on tiny models. No figure in it counts.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        out.touch()
        _run(arguments, device, out)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    _finish(arguments, device, lines)


def _run(arguments: Namespace, device: torch.device, out: Path) -> None:
    """Start processes until every section has ended, failed, or lost its time."""
    deadline = time.monotonic() + 60 * arguments.minutes
    # A dry run needs no protection from a device that hangs, and starting processes is most of its time.
    for group in _ORDER if device.type == "cuda" else (SECTIONS,):
        waiting = [name for name in group if name in arguments.sections]
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                _note(out, waiting, "no time was left for it")
                break
            # What comes after a group needs its share too.
            share = left - _reserved(arguments, group)
            asked = waiting
            seconds = max(share, 10.0)
            crashed = _start(arguments, device, out, asked, seconds, min(seconds + 45, left + 20))
            done = {line["section"] for line in _lines(out) if line["kind"] in ("end", "failed")}
            waiting = [name for name in waiting if name not in done]
            # Sections run in order: the first that did not end is the one its process died in.
            lost = waiting[:1] or (asked[-1:] if crashed else [])
            _note(out, lost, "a process of it died or ran out of time")
            waiting = waiting[1:]


def _reserved(arguments: Namespace, group: tuple[str, ...]) -> float:
    """Seconds to keep for later groups, of a whole run's typical need; scaled where less time was given."""
    need = {"attention": 35.0, "products": 40.0, "smollm2": 10.0, "compiled": 70.0}
    rest = _ORDER[_ORDER.index(group) + 1 :] if group in _ORDER else ()
    later = [name for other in rest for name in other if name in arguments.sections]
    return sum(need.get(name, 0.0) for name in later) * arguments.minutes / 8.5


def _start(
    arguments: Namespace, device: torch.device, out: Path, names: list[str], seconds: float, limit: float
) -> bool:
    """A process for the sections, or several for one; ended after `limit` seconds. True if one ended badly."""
    command = [sys.executable, "-m", "bench.gpu.sections", *names, "--out", str(out), "--device", device.type]
    command += ["--seconds", str(seconds), "--seed", str(arguments.seed)]
    command += ["--recordings", str(arguments.recordings)]
    command += ["--quick"] if arguments.quick else []
    for line in _lines(out):
        if line["kind"] == "plan":
            command += ["--plan", line["model"], line["plan"]]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})
    # Checks spend their time on compiling, which many processes do at once.
    parts = min(6, os.cpu_count() or 1) if names == ["checks"] and device.type == "cuda" else 1
    processes = [
        subprocess.Popen([*command, "--part", str(part), str(parts)], cwd=ROOT, env=environment)
        for part in range(parts)
    ]
    end = time.monotonic() + limit
    for process in processes:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"{', '.join(names)}: ended after {limit:.0f} s", flush=True)
    return any(process.returncode for process in processes)


def _note(out: Path, names: list[str], error: str) -> None:
    with out.open("a") as file:
        for name in names:
            file.write(json.dumps({"kind": "failed", "section": name, "error": error}) + "\n")


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def _finish(arguments: Namespace, device: torch.device, lines: list[dict[str, Any]]) -> None:
    """Tables by section, what failed, the claims, and the document."""
    rows = [
        {key: value for key, value in line.items() if key != "kind"} for line in lines if line["kind"] == "row"
    ]
    for name in SECTIONS:
        own = [{key: row[key] for key in row if key != "section"} for row in rows if row["section"] == name]
        if own:
            print(f"\n{name}\n{table(own)}")
    failed = [line for line in lines if line["kind"] == "failed"]
    for line in failed:
        print(f"FAILED {line['section']}: {line['error']}")
        rows.append({"section": line["section"], "case": "FAILED", "what": line["error"], "value": None})
    made = claims(rows, open_=arguments.quick or device.type == "cpu")
    made.append(_sections_claim(arguments, failed))
    result = document("gpu", arguments, device, rows, made)
    if device.type == "cuda" and not arguments.quick:
        arguments.results.mkdir(parents=True, exist_ok=True)
        name = device_name(device).lower().replace(" ", "-").replace("/", "-")
        path = arguments.results / f"{name}-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    show(result, arguments)


def _sections_claim(arguments: Namespace, failed: list[dict[str, Any]]) -> dict[str, Any]:
    """How many sections ran to their end: a counted claim, decided in every form."""
    ended = len(arguments.sections) - len({line["section"] for line in failed})
    return {
        "name": "sections-that-ran",
        "value": ended / len(arguments.sections),
        "bar": "1",
        "holds": ended == len(arguments.sections),
    }
