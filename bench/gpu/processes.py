"""Runs the sections of the GPU bench in processes that may crash.

Contract: `run` returns when every section has ended, failed, or run out of time. A section is lost when its
process ends before it does; the sections after it run in a new process. Where a section records its current case
(Context.cases), the new process continues after the case that crashed the old one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from . import results
from .plan import ORDER, SECTIONS, SHARED, seconds

ROOT = Path(__file__).parents[2]
PROCESS = [sys.executable, "-m", "bench.gpu.section_process"]
# Extra seconds in which a section that began in time may finish.
GRACE = 45.0


def run(arguments: Namespace, device: torch.device, lines: Path) -> None:
    """Start the processes, one group of sections after another."""
    deadline = time.monotonic() + 60 * arguments.minutes
    # A dry run uses one process: no device can hang, and starting processes would take most of its time.
    for group in ORDER if device.type == "cuda" else (SECTIONS,):
        waiting = [name for name in group if name in arguments.sections]
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                for name in waiting:
                    results.append(lines, kind="failed", section=name, part=0, error="no time was left for it")
                break
            own = seconds(waiting, arguments.sections, left, arguments.minutes)
            start(arguments, device, lines, waiting, own, min(own + min(own, GRACE), left + 20))
            waiting = _still_waiting(lines, waiting)


def _still_waiting(lines: Path, asked: list[str]) -> list[str]:
    """The sections still to run; sections lost with their process are recorded."""
    states = results.states(results.read(lines))
    begun = [name for name in asked if name in states]
    # If nothing was begun, drop the first section: the process would crash there again.
    lost = [name for name in begun if "start" in states[name]] or ([] if begun else asked[:1])
    for name in lost:
        results.append(lines, kind="lost", section=name, error="a process of it died or ran out of time")
    return [name for name in asked if name not in begun and name not in lost]


def start(
    arguments: Namespace, device: torch.device, lines: Path, names: list[str], own: float, limit: float
) -> None:
    """Run the sections in one process, or one SHARED section in several; kill them after `limit` seconds."""
    parts = min(6, os.cpu_count() or 1) if names[0] in SHARED and device.type == "cuda" else 1
    begun, seen = time.monotonic(), lines.stat().st_size

    def begin(part: int, after: int) -> subprocess.Popen[bytes]:
        left = max(1.0, own - (time.monotonic() - begun))
        command = [*PROCESS, *names, *_options(arguments, device, lines), "--seconds", str(left)]
        return subprocess.Popen(
            [*command, "--part", str(part), str(parts), "--after", str(after)], cwd=ROOT, env=_environment(device)
        )

    running = {part: begin(part, 0) for part in range(parts)}
    try:
        while running and time.monotonic() - begun < limit:
            time.sleep(0.1)
            for part in _ended(running):
                status = running.pop(part).returncode
                broken = results.last_case(results.read(lines), names[0], part) if status else None
                if len(names) == 1 and broken is not None and time.monotonic() - begun < own:
                    running[part] = begin(part, broken + 1)
            seen = _keep_up(lines, seen)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
            print(f"{', '.join(names)}: ended after {time.monotonic() - begun:.0f} s", flush=True)


def _keep_up(lines: Path, seen: int) -> int:
    """Rewrite the document if a section ended after the file's first `seen` bytes; returns the file's size."""
    size = lines.stat().st_size
    if size != seen:
        with lines.open("rb") as file:
            file.seek(seen)
            fresh = file.read()
        if b'"kind": "end"' in fresh or b'"kind": "failed"' in fresh:
            results.write(results.read(lines), lines.parent)
    return size


def _ended(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[int]:
    yield from [part for part, process in running.items() if process.poll() is not None]


def _options(arguments: Namespace, device: torch.device, lines: Path) -> list[str]:
    options = ["--out", str(lines), "--device", device.type, "--seed", str(arguments.seed)]
    return [*options, "--recordings", str(arguments.recordings), *(["--quick"] if arguments.quick else [])]


def _environment(device: torch.device) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})
