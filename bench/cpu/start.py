"""`python -m bench start`: seconds until the model is ready, from the second start on.

Contract: times a fresh process that imports bass_core and calls `load_pair`, and `python app.py` until it serves
the page: once with --draft-length bass, and once with its defaults in a cache folder that holds the weights but no
measured costs. The first start of each kind is not counted: it may convert the model, and it reads the files from
disk. Medians in seconds. To show that the model was ready, every start must write the same text afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from ..fresh_cache import fresh_cache
from ..report.report import CPU, ROOT, Row, claim, finish, median, parser
from .page import PROMPT, app

STARTS = 7
START = """
import json, sys, time
begun = time.perf_counter()
from bass_core import generate, load_pair
imported = time.perf_counter()
pair = load_pair(sys.argv[1])
ready = time.perf_counter()
written = generate(pair, sys.argv[2], max_new_tokens=8, draft_length="bass").sequences[0].token_ids
print(json.dumps([imported - begun, ready - imported, written]))
"""


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    made = parser("start", __doc__ or "", "pair")
    made.set_defaults(draft=None)
    arguments = made.parse_args(argv)
    names = ("import torch and transformers", "load_pair", "python app.py, all of it", "the same, no costs known")
    times: dict[str, list[float]] = {name: [] for name in names}
    texts = set()
    # The quick form starts everything once, and counts it.
    for start in range(1 if arguments.quick else 1 + STARTS):
        imported, loaded, text = _library(arguments.pair)
        texts.add(text)
        for name, seconds in zip(names, (imported, loaded, _page(arguments), _first_page(arguments)), strict=True):
            times[name] += [seconds] if start or arguments.quick else []
    results: list[Row] = [
        {"phase": name, "starts": len(taken), "median s": median(taken), "fastest s": min(taken),
         "slowest s": max(taken)}
        for name, taken in times.items()
    ]  # fmt: skip
    ready = median(times["load_pair"])
    claims = [
        claim("model ready, s", ready, "under 5", None if arguments.quick else ready < 5),
        claim("different texts", len(texts), "1", len(texts) == 1),
    ]
    finish("start", arguments, CPU, results, claims)


def _library(pair: str) -> tuple[float, float, tuple[int, ...]]:
    command = [sys.executable, "-c", START, pair, PROMPT]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    importing, loading, written = json.loads(done.stdout.splitlines()[-1])
    return importing, loading, tuple(written)


def _page(arguments: argparse.Namespace, draft_length: str = "bass") -> float:
    begun = time.perf_counter()
    with app(arguments, draft_length):
        return time.perf_counter() - begun


def _first_page(arguments: argparse.Namespace) -> float:
    with fresh_cache():
        return _page(arguments, "auto")
