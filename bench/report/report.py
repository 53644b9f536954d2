"""What every bench prints: a table for people, and one JSON document as the last line.

Contract: the document is {"bench", "command", "device", "versions", "revision", "seed", "weights_sha256", "quick",
"date", "results", "claims"}; a claim is {"name", "value", "bar", "holds"}, `holds` null while it is undecided.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bass_core.model.loading.wheel import sha256


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every bench takes."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document there as well")
    made.add_argument("--quick", action="store_true", help="seconds instead of minutes; some claims stay open")
    made.add_argument("--seed", type=int, default=0)
    return made


def claim(name: str, value: float, bar: str, holds: bool | None) -> dict[str, Any]:
    """One claim of a bench."""
    return {"name": name, "value": round(value, 4), "bar": bar, "holds": holds}


def interleaved(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each arm's calls, interleaved: every repeat runs all arms, after an unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def median(values: list[float]) -> float:
    """The median of the values."""
    return statistics.median(values)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as an aligned text table."""
    if not rows:
        return ""
    heads = list(rows[0])
    cells = [[_cell(row.get(head)) for head in heads] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(heads, *cells, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [heads, *cells]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def with_report(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the --report option of benches that draw figures."""
    made.add_argument("--report", type=Path, metavar="FOLDER", help="draw an HTML page and PNGs there")
    return made


def finish(
    bench: str,
    arguments: argparse.Namespace,
    device: torch.device,
    results: list[dict[str, Any]],
    claims: list[dict[str, Any]],
    weights: Path | None = None,
) -> None:
    """Print the table, the claims and the JSON line; write the JSON file if --json was given."""
    print(table(results))
    show(document(bench, arguments, device, results, claims, weights), arguments)


def show(made: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a document's claims and its JSON line; write the JSON file if --json was given."""
    for one in made["claims"]:
        verdict = {True: "holds", False: "MISSED", None: "open"}[one["holds"]]
        print(f"{one['name']}: {one['value']} (bar: {one['bar']}) {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


def document(
    bench: str,
    arguments: argparse.Namespace,
    device: torch.device,
    results: list[dict[str, Any]],
    claims: list[dict[str, Any]],
    weights: Path | None = None,
) -> dict[str, Any]:
    """A bench's document, ready for JSON."""
    return {
        "bench": bench,
        "command": command(),
        "device": device_name(device),
        "versions": versions(),
        "revision": revision(),
        "seed": arguments.seed,
        "weights_sha256": sha256(weights) if weights is not None and weights.exists() else None,
        "quick": arguments.quick,
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
        "claims": claims,
    }


def command() -> str:
    """The running command line, without the options that say where to write."""
    given = re.sub(r" --(json|report|samples) \S+", "", shlex.join(sys.argv[1:]))
    return f"python -m bench {given}"


def device_name(device: torch.device) -> str:
    """The device's name, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of the software that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "gradio"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """The git revision of the tree, with a plus sign if it has changes; None outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
