"""`python -m bench start`: how long a second start takes until the model is ready.

Contract: each start is a fresh process that imports bass_core and calls `load_pair`; the first one, which may
convert the model and reads its files from disk, is not counted. Seconds, medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .report import claim, finish, median, parser

STARTS = 9
ROOT = Path(__file__).resolve().parents[1]
START = """
import json, sys, time
begun = time.perf_counter()
from bass_core import load_pair
imported = time.perf_counter()
load_pair(sys.argv[1])
print(json.dumps([imported - begun, time.perf_counter() - imported]))
"""


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    made = parser("start", __doc__ or "")
    made.add_argument("--pair", default="smollm2")
    arguments = made.parse_args(argv)
    wanted = 1 if arguments.quick else STARTS
    _start(arguments.pair)
    starts = [_start(arguments.pair) for _ in range(wanted)]
    phases = dict(zip(("import torch and transformers", "load_pair"), zip(*starts, strict=True), strict=True))
    results: list[dict[str, Any]] = [
        {"phase": name, "median s": median(list(times)), "fastest s": min(times), "slowest s": max(times)}
        for name, times in phases.items()
    ]
    ready = median(list(phases["load_pair"]))
    claims = [
        claim("model ready, s", ready, "under 5", None if arguments.quick else ready < 5),
        claim("starts measured", len(starts), f"{wanted}", len(starts) == wanted),
    ]
    finish("start", arguments, torch.device("cpu"), results, claims)


def _start(pair: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", START, pair], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds
