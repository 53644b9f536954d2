"""`python -m bench start`: how long a second start takes until the model is ready.

Contract: each start is a fresh process that imports bass_core and calls `load_pair`, and another that is
`python app.py` until it serves the page; the first of both, which may convert the model and reads its files from
disk, is not counted. Seconds, medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .page import app
from .report import claim, finish, median, parser

STARTS = 7
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
    made.set_defaults(draft=None)
    arguments = made.parse_args(argv)
    wanted = 1 if arguments.quick else STARTS
    starts = [[*_library(arguments.pair), _page(arguments)] for _ in range(1 + wanted)][1:]
    names = ("import torch and transformers", "load_pair", "python app.py, all of it")
    phases = dict(zip(names, zip(*starts, strict=True), strict=True))
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


def _library(pair: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", START, pair], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _page(arguments: argparse.Namespace) -> float:
    begun = time.perf_counter()
    with app(arguments):
        return time.perf_counter() - begun
