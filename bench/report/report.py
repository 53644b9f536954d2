"""Code that all benches share: options (`parser`), claims, tables, and the JSON document (`finish`).

The document is {"bench", "command", "device", "versions", "revision", "seed", "weights_sha256", "quick", "date",
"results", "claims"}. A claim is {"name", "value", "bar", "holds"}; `holds` is null while it is undecided.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from app import whole as whole
from bass_core import ModelPair, load_pair
from bass_core.__main__ import Parser
from bass_core.errors import RequestError
from bass_core.length.options import DraftLength, check_draft_length
from bass_core.machine.digest import sha256
from ui.recordings.revision import revision as revision

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
VERDICTS = {True: "holds", False: "MISSED", None: "open"}
# The options that choose the pair to measure, by name.
MODELS: dict[str, dict[str, Any]] = {
    "pair": {"default": "smollm2"},
    "draft": {"help": "a folder or Hub id, instead of the pair's own"},
    "device": {"default": "auto"},
    "dtype": {"default": "auto"},
}

Row = dict[str, Any]


def parser(name: str, description: str, *models: str, figures: bool = False) -> argparse.ArgumentParser:
    """Return an argument parser with the options of every bench.

    Args:
        description: the text of --help.
        *models: names of further options, see MODELS.
        figures: whether to add --report, for a bench that draws.
    """
    cli = Parser(prog=f"python -m bench {name}", description=description)
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the JSON document to FILE")
    cli.add_argument("--quick", action="store_true", help="seconds instead of minutes; some claims stay open")
    cli.add_argument("--seed", type=whole(0, 2**63 - 1), default=0)
    for option in models:
        cli.add_argument(f"--{option}", **MODELS[option])
    if figures:
        cli.add_argument("--report", type=Path, metavar="FOLDER", help="write the figures to FOLDER, as PNGs")
    return cli


def number(least: float = 0.0, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Return the type of an option for a finite number from `least` to `most`; if `above`, `least` is excluded."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most or (above and value == least):
            limits = f"{'above' if above else 'of at least'} {least:g}"
            limits += f" and at most {most:g}" if math.isfinite(most) else ""
            raise argparse.ArgumentTypeError(f"must be a number {limits}; got {text!r}")
        return value

    return read


def draft_length(text: str) -> DraftLength:
    """Parse an option that takes a draft length: a name or a number."""
    try:
        return check_draft_length(int(text) if text.isdecimal() and len(text) < 9 else text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def readable(text: str) -> Path:
    """Parse an option that names a file to read."""
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def writable(text: str) -> Path:
    """Parse an option that names a file to write, and refuse it at once if its folder does not exist."""
    if not text or os.path.isdir(text) or not os.path.isdir(Path(text).parent):
        raise argparse.ArgumentTypeError(f"no file can be written at {text!r}: name one in an existing folder")
    return Path(text)


def load(arguments: argparse.Namespace, **fixed: Any) -> ModelPair:
    """Load the pair that the options of `parser` choose; `fixed` are further arguments of `load_pair`."""
    chosen = {name: getattr(arguments, name) for name in MODELS if name != "pair" and hasattr(arguments, name)}
    pair = load_pair(arguments.pair, **chosen | fixed)
    # As app.py does: a search for garbage among all objects of the libraries would take 0.2 s of some round.
    gc.collect()
    gc.freeze()
    return pair


def claim(name: str, value: float | None, bar: str, holds: bool | None) -> Row:
    """Return one claim of a bench.

    Args:
        name: the quantity.
        value: its value, or None if it was not measured.
        bar: the condition in words, for example "at most 5".
        holds: whether the value meets the bar; None if this run can't decide.
    """
    return {"name": name, "value": None if value is None else round(value, 4), "bar": bar, "holds": holds}


def at_most(name: str, value: float, bar: float, decided: bool = True) -> Row:
    """Return the claim that the value is at most `bar`; it stays open if `decided` is False."""
    return claim(name, value, f"at most {bar:g}", value <= bar if decided else None)


def at_least(name: str, value: float, bar: float, decided: bool = True) -> Row:
    """Return the claim that the value is at least `bar`; it stays open if `decided` is False."""
    return claim(name, value, f"at least {bar:g}", value >= bar if decided else None)


def alike(name: str, value: float, decided: bool = True) -> Row:
    """Return the claim that a share is 1; it stays open if `decided` is False."""
    return claim(name, value, "1.0", value == 1 if decided else None)


def interleaved(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each arm's calls; every repeat runs all arms, after an unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def median(values: list[float]) -> float:
    """Return the median of the values."""
    return statistics.median(values)


def table(rows: list[Row]) -> str:
    """Return rows with the same keys as an aligned text table."""
    if not rows:
        return ""
    heads = list(rows[0])
    cells = [[_cell(row.get(head)) for head in heads] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(heads, *cells, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [heads, *cells]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def finish(
    bench: str,
    arguments: argparse.Namespace,
    of: ModelPair | torch.device,
    results: list[Row],
    claims: list[Row],
) -> None:
    """Print the table, the claims and the JSON line; write the JSON file if --json was given."""
    print(table(results))
    show(document(bench, arguments, of, results, claims), arguments)


def show(report: Row, arguments: argparse.Namespace) -> None:
    """Print a document's claims and its JSON line; write the JSON file if --json was given."""
    for each in report["claims"]:
        print(f"{each['name']}: {each['value']} (bar: {each['bar']}) {VERDICTS[each['holds']]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def document(
    bench: str,
    arguments: argparse.Namespace,
    of: ModelPair | torch.device,
    results: list[Row],
    claims: list[Row],
) -> Row:
    """Return a bench's document, ready for JSON; `of` is the measured pair, or the device if there is no pair."""
    weights = None if isinstance(of, torch.device) else weights_of(of)
    return {
        "bench": bench,
        "command": command(),
        "device": device_name(of if isinstance(of, torch.device) else of.device),
        "versions": versions(),
        "revision": revision(),
        "seed": arguments.seed,
        "weights_sha256": sha256(weights) if weights is not None and weights.exists() else None,
        "quick": arguments.quick,
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
        "claims": claims,
    }


def weights_of(pair: ModelPair) -> Path:
    """Return the file with the target's weights; it need not exist."""
    return Path(str(pair.target.name_or_path)) / "model.safetensors"


def command() -> str:
    """Return the command line, without options for output files, and with only the names of input files."""
    words = [Path(word).name if os.path.isfile(word) else word for word in sys.argv[1:]]
    options = re.sub(r" --(json|report|samples) \S+", "", shlex.join(words))
    return f"python -m bench {options}"


def device_name(device: torch.device) -> str:
    """Return the device's name, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Return the versions of the software that the figures depend on."""
    by_name = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "gradio"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
