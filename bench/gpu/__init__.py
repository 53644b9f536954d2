"""`python -m bench gpu`: kernels, texts, steps and lanes on one CUDA device, in one command.

Contract: each section runs in a process of its own. What ends one, an error, a crash or its limit of seconds, is
one line of the report, and the next begins. The document is written anew with every figure, so that whatever ends
the command, what was measured is there; the same command then runs only the sections that have not ended. Needs no
network: models are built from configs with random weights. Without a GPU the same sections make a dry run on tiny
models, in which no time counts. `--here` runs sections in this process, for compute-sanitizer and ncu. Non-goal:
the shipped pair; `bench batch --device cuda` measures it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..report.report import claim, device_name, document, parser, show, table
from .checks import faults, texts
from .context import Context, Row
from .kernels import kernels
from .speed import backends, lanes, readings, steps

ROOT = Path(__file__).parents[2]
# What each section runs, and after how many seconds it is ended.
SECTIONS: dict[str, tuple[Callable[[Context], None], int]] = {
    "texts": (texts, 150),
    "kernels": (kernels, 240),
    "steps": (steps, 120),
    "backends": (backends, 90),
    "readings": (readings, 60),
    "lanes": (lanes, 300),
    "faults": (faults, 120),
}
CHECKS = ("texts", "kernels", "faults")
ENDED = "ran to its end"
# What a section's process writes before each figure.
MARK = "figure: "
# Claims: the figures that are divided, or the only one, by section, case and what; and the bar.
RATIOS = {
    "a step of batch 1 / its floor": ("steps", ["target b1 x 1 kv512"], "step / floor", "at most", 1.15),
    "a step of batch 8 / its floor": ("steps", ["target b8 x 1 kv512"], "step / floor", "at most", 1.25),
    "verifying 5 tokens / a step": (
        "steps",
        ["target b8 x 5 kv512", "target b8 x 1 kv512"],
        "step",
        "at most",
        1.25,
    ),
    "regular / BASS": ("lanes", ["b8 a0.8 regular", "b8 a0.8 bass"], "ms/token", "at least", 2.5),
    "generate / BASS": ("lanes", ["b8 a0.8 generate", "b8 a0.8 bass"], "ms/token", "at least", 4.0),
    # The paper reaches 15.8 %.
    "BASS's share of the peak FLOP/s": ("lanes", ["b8 a0.9 bass"], "FLOPs", "at least", 0.158),
}


def main(argv: list[str]) -> None:
    """Run, print, write."""
    options = parser("gpu", __doc__ or "")
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--here", nargs="+", choices=SECTIONS, default=[], help="sections to run in this process")
    arguments = options.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.here:
        for name in arguments.here:
            run_here(name, arguments, device)
        return
    made = document("gpu", arguments, device, [], [])
    if device.type == "cuda":
        made["versions"] |= {"cuda": torch.version.cuda, "capability": torch.cuda.get_device_capability(device)}
        name = "-".join(["gpu", *device_name(device).lower().split(), made["date"]])
        arguments.json = arguments.json or ROOT / "bench" / "results" / f"{name}.json"
    print(f"{made['device']}: {made['versions']}", flush=True)
    # `timeout` then ends the run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(arguments, device, made)
    except KeyboardInterrupt:
        print("Interrupted.", flush=True)
    for name in arguments.sections:
        rows = [row for row in made["results"] if row["section"] == name]
        print(f"\n{table(rows)}")
    show(made, arguments)


def resumed(made: dict[str, Any], path: Path | None) -> list[Row]:
    """The figures of the sections that an earlier run of the same command has brought to their ends."""
    try:
        found = json.loads("" if path is None else path.read_text(encoding="utf-8"))
        alike = all(found[name] == made[name] for name in ("bench", "device", "revision", "seed", "quick"))
    except (OSError, ValueError, KeyError):
        return []
    rows = found["results"] if alike else []
    ended = {row["section"] for row in rows if row["what"] == ENDED}
    return [row for row in rows if row["section"] in ended]


def run(arguments: Namespace, device: torch.device, made: dict[str, Any]) -> None:
    """Run the sections one after another, and keep the document and its file up to date."""
    made["results"] = resumed(made, arguments.json)
    ended = [row["section"] for row in made["results"] if row["what"] == ENDED]

    def take(row: Row) -> None:
        made["results"].append(row)
        timed = device.type == "cuda" and not arguments.quick
        made["claims"] = claims(made["results"], arguments.sections, ended, timed)
        if arguments.json:
            part = arguments.json.with_suffix(".part")
            part.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            os.replace(part, arguments.json)

    for name in arguments.sections:
        print(f"{name}:{' ran before' * (name in ended)}", flush=True)
        if name in ended:
            continue
        command = [sys.executable, "-m", "bench", "gpu", "--here", name, "--seed", str(arguments.seed)]
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        if device.type != "cuda" and name == "kernels":
            environment["TRITON_INTERPRET"] = "1"
        why = run_process(command + ["--quick"] * arguments.quick, environment, SECTIONS[name][1], take)
        ended += [] if why else [name]
        what = f"FAILED: {why}" if why else ENDED
        take({"section": name, "case": "section", "what": what, "value": None, "unit": ""})


def run_process(
    command: list[str], environment: dict[str, str], limit: float, take: Callable[[Row], None]
) -> str | None:
    """Run a section's process and pass its figures on as they come; returns why it did not end well, or None."""
    said = "nothing"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if not line.startswith(MARK):
                    print(line, end="", flush=True)
                    said = line.strip() or said
                elif line.endswith("\n"):
                    take(json.loads(line.removeprefix(MARK)))
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if status < 0:
        return f"signal {-status} ended it, whose limit is {limit:g} s, after: {said}"
    return said if status else None


def run_here(name: str, arguments: Namespace, device: torch.device) -> None:
    """Run a section in this process; an error is its last line, and ends the process with status 1."""

    def emit(row: Row) -> None:
        print(MARK + json.dumps(row), flush=True)

    try:
        SECTIONS[name][0](Context(name, device, emit, arguments.seed, arguments.quick))
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0][:300], flush=True)
        # Without the interpreter's own end, which a broken device can block.
        os._exit(1)


def claims(rows: list[Row], sections: list[str], ended: list[str], timed: bool) -> list[dict[str, Any]]:
    """The checks, and RATIOS of what was measured: open where `timed` is False or a figure is missing."""
    by = {(row["section"], row["case"], row["what"]): row for row in rows}
    share = len(set(ended) & set(sections)) / len(sections)
    made = [claim("sections that ran to their end", share, "1", share == 1)]
    for name in [name for name in CHECKS if name in sections]:
        row = by.get((name, "cases", "passed"))
        passed = row["value"] / int(row["unit"].removeprefix("of ")) if row else 0.0
        made.append(claim(f"{name}: cases that passed", passed, "1", passed == 1))
    for name, (section, cases, what, sign, bar) in RATIOS.items():
        found = [by[section, case, what]["value"] for case in cases if (section, case, what) in by]
        if len(found) < len(cases):
            made.append(claim(name, 0.0, f"{sign} {bar}", None))
            continue
        value = found[0] / (found[1] if len(found) > 1 else 1)
        holds = value <= bar if sign == "at most" else value >= bar
        made.append(claim(name, value, f"{sign} {bar}", holds if timed else None))
    return made
