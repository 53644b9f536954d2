"""`python -m bench gpu`: kernels, rounds, lanes and texts on one CUDA device, in one command.

Each section runs in a separate process. If it ends with an error, a crash or a timeout, the report has one line
about it and the next section starts. The result file is rewritten after every figure, so nothing measured is lost
when the command is interrupted; the same command then runs only the unfinished sections. No network is needed:
models are built from configs with random weights ("shipped" downloads its pair). Without a GPU the same sections
are a dry run on tiny models, whose times mean nothing. `--here` runs sections in this process, for
compute-sanitizer and ncu.
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
from typing import Any, NamedTuple

import torch

from bass_core.machine.cuda import gpu_expected, why_unusable

from ..cpu.batch import ARMS
from ..report.report import claim, device_name, document, number, parser, show, table, whole
from .checks import faults, texts
from .context import Context, LaneCases, Row
from .kernels import kernels
from .rounds import rounds
from .shipped import shipped
from .speed import backends, lanes, one_layer, readings, steps

ROOT = Path(__file__).parents[2]


class Section(NamedTuple):
    """One section.

    Attributes:
        limit_s: the seconds after which its process is ended.
        quick: whether it always runs as with --quick.
    """

    run: Callable[[Context], None]
    limit_s: int
    quick: bool = False


# By value: in fifteen minutes on a card, those before "shipped" should end.
SECTIONS = {
    "first-kernels": Section(kernels, 90, quick=True),
    "rounds": Section(rounds, 90),
    "lanes": Section(lanes, 240),
    "one-layer": Section(one_layer, 90),
    "steps": Section(steps, 90, quick=True),
    "texts": Section(texts, 120),
    "faults": Section(faults, 90),
    "shipped": Section(shipped, 180),
    "kernels": Section(kernels, 240),
    "backends": Section(backends, 150),
    "readings": Section(readings, 60),
}
CHECKS = ("first-kernels", "texts", "kernels", "faults")
# Options of the section "lanes", in the order of LaneCases.
LANES = ("batch", "acceptance", "arms")
ENDED = "ran to its end"
# A section's process prints each figure after this mark.
MARK = "figure: "
# Claims by name: the section, the cases, the figure's name, and the bar. Of two cases we claim the ratio of the
# first to the second.
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
    # In the paper this share is 15.8 %.
    "BASS's share of the peak FLOP/s": ("lanes", ["b8 a0.9 bass"], "FLOPs", "at least", 0.158),
}


def main(argv: list[str]) -> None:
    """Run, print and write."""
    options = parser("gpu", __doc__ or "")
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--here", nargs="+", choices=SECTIONS, default=[], help="sections to run in this process")
    options.add_argument("--batch", type=whole(), nargs="+", default=[], help='batch sizes of "lanes"')
    options.add_argument("--acceptance", type=number(0, 1), nargs="+", default=[], help="their acceptances")
    options.add_argument("--arms", choices=ARMS, nargs="+", default=[], help="their arms besides regular decoding")
    arguments = options.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.here:
        for name in arguments.here:
            run_here(name, arguments, device)
        return
    if device.type == "cpu" and gpu_expected():
        print(f"The sections run on the CPU: {why_unusable(torch.device('cuda'))}.", flush=True)
    report = document("gpu", arguments, device, [], [])
    report["lanes"] = {option: vars(arguments)[option] for option in LANES}
    if device.type == "cuda":
        report["versions"] |= {"cuda": torch.version.cuda, "capability": torch.cuda.get_device_capability(device)}
        name = "-".join(["gpu", *device_name(device).lower().split(), report["date"]])
        arguments.json = arguments.json or ROOT / "bench" / "results" / f"{name}.json"
    print(f"{report['device']}: {report['versions']}", flush=True)
    # So `timeout` ends the run like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(arguments, device, report)
    except KeyboardInterrupt:
        print("Interrupted.", flush=True)
    for name in arguments.sections:
        rows = [row for row in report["results"] if row["section"] == name]
        print(f"\n{table(rows)}")
    show(report, arguments)


def resumed(report: dict[str, Any], path: Path | None) -> list[Row]:
    """Return the figures of the sections that an earlier run of the same command has finished."""
    try:
        earlier = json.loads("" if path is None else path.read_text(encoding="utf-8"))
        alike = all(
            earlier[name] == report[name] for name in ("bench", "device", "revision", "seed", "quick", "lanes")
        )
    except (OSError, ValueError, KeyError):
        return []
    rows = earlier["results"] if alike else []
    ended = {row["section"] for row in rows if row["what"] == ENDED}
    return [row for row in rows if row["section"] in ended]


def run(arguments: Namespace, device: torch.device, report: dict[str, Any]) -> None:
    """Run the sections one after another, and keep the document `report` and its file up to date."""
    report["results"] = resumed(report, arguments.json)
    ended = [row["section"] for row in report["results"] if row["what"] == ENDED]

    def take(row: Row) -> None:
        report["results"].append(row)
        timed = device.type == "cuda" and not arguments.quick
        report["claims"] = claims(report["results"], arguments.sections, ended, timed)
        if arguments.json:
            part = arguments.json.with_suffix(".part")
            part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            os.replace(part, arguments.json)

    for name in arguments.sections:
        print(f"{name}:{' ran before' * (name in ended)}", flush=True)
        if name in ended:
            continue
        command = [sys.executable, "-m", "bench", "gpu", "--here", name, "--seed", str(arguments.seed)]
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        if device.type != "cuda" and SECTIONS[name].run is kernels:
            environment["TRITON_INTERPRET"] = "1"
        command += ["--quick"] * arguments.quick
        for option in LANES if name == "lanes" else ():
            command += [f"--{option}", *map(str, vars(arguments)[option])] if vars(arguments)[option] else []
        why = run_process(command, environment, SECTIONS[name].limit_s, take)
        ended += [] if why else [name]
        what = f"FAILED: {why}" if why else ENDED
        take({"section": name, "case": "section", "what": what, "value": None, "unit": ""})


def run_process(
    command: list[str], environment: dict[str, str], limit: float, take: Callable[[Row], None]
) -> str | None:
    """Run a section's process and pass its figures to `take` as they come; return why it failed, or None."""
    last_line = "nothing"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if not line.startswith(MARK):
                    print(line, end="", flush=True)
                    last_line = line.strip() or last_line
                elif line.endswith("\n"):
                    take(json.loads(line.removeprefix(MARK)))
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if status < 0:
        return f"signal {-status} ended it, whose limit is {limit:g} s, after: {last_line}"
    return last_line if status else None


def run_here(name: str, arguments: Namespace, device: torch.device) -> None:
    """Run a section in this process; on an error, print it as the last line and exit with status 1."""

    def emit(row: Row) -> None:
        print(MARK + json.dumps(row), flush=True)

    try:
        section = SECTIONS[name]
        cases = LaneCases(*(tuple(vars(arguments)[option]) for option in LANES))
        section.run(Context(name, device, emit, arguments.seed, arguments.quick or section.quick, cases))
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0][:300], flush=True)
        # Exit at once: a broken device can block the interpreter's normal exit.
        os._exit(1)


def claims(rows: list[Row], sections: list[str], ended: list[str], timed: bool) -> list[dict[str, Any]]:
    """Return the claims: the checks, and RATIOS, which stay open if `timed` is False or a figure is missing."""
    by = {(row["section"], row["case"], row["what"]): row for row in rows}
    share = len(set(ended) & set(sections)) / len(sections)
    verdicts = [claim("sections that ran to their end", share, "1", share == 1)]
    for name in [name for name in CHECKS if name in sections]:
        row = by.get((name, "cases", "passed"))
        passed = row["value"] / int(row["unit"].removeprefix("of ")) if row else 0.0
        verdicts.append(claim(f"{name}: cases that passed", passed, "1", passed == 1))
    for name, (section, cases, what, sign, bar) in RATIOS.items():
        values = [by[section, case, what]["value"] for case in cases if (section, case, what) in by]
        if len(values) < len(cases):
            verdicts.append(claim(name, 0.0, f"{sign} {bar}", None))
            continue
        value = values[0] / (values[1] if len(values) > 1 else 1)
        holds = value <= bar if sign == "at most" else value >= bar
        verdicts.append(claim(name, value, f"{sign} {bar}", holds if timed else None))
    return verdicts
