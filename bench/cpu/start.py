"""`python -m bench start`: seconds until the model is ready, at the first start and from the second one on.

First it times a new process that imports bass_core and calls `load_pair`. Two parts of this also have separate
figures: the checks of each model at load (the trial and the comparisons with transformers' code, model/select.py),
and the check of the models at the start of each call. Then it times `python app.py` until it serves the page: once
with --draft-length bass, and once with its defaults in a cache folder that holds the weights but no measured
costs. The first start of each kind does not count, because it may convert the model and reads the files from disk.
Figures are medians in seconds. To prove that the model is ready, every start then writes a text, which must always
be the same. The last line is one start in a cache folder that holds only the downloaded file, with which the model
is converted and the kernels are compiled.
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
from bass_core.model import attention, select
imported = time.perf_counter()
trials = []
def timed(function):
    def call(*arguments):
        begun = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            trials.append(time.perf_counter() - begun)
    return call
select.trial, select.why_modified = timed(select.trial), timed(select.why_modified)
attention.refuse_replaced = timed(attention.refuse_replaced)
pair = load_pair(sys.argv[1])
ready = time.perf_counter()
tried = sum(trials)
written = generate(pair, sys.argv[2], max_new_tokens=8, draft_length="bass").sequences[0].token_ids
checked = time.perf_counter()
pair.refresh()
times = [imported - begun, ready - imported, tried, time.perf_counter() - checked]
print(json.dumps([times, written]))
"""
LIBRARY = ("import torch and transformers", "load_pair", "of it, trying the models", "a call's look at the models")


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    cli = parser("start", __doc__ or "", "pair")
    cli.set_defaults(draft=None)
    arguments = cli.parse_args(argv)
    names = (*LIBRARY, "python app.py, all of it", "the same, no costs known")
    times: dict[str, list[float]] = {name: [] for name in names}
    texts = set()
    # With --quick everything starts only once, and this start counts.
    for start in range(1 if arguments.quick else 1 + STARTS):
        library, text = _library(arguments.pair)
        texts.add(text)
        for name, seconds in zip(names, (*library, _page(arguments), _first_page(arguments)), strict=True):
            times[name] += [seconds] if start or arguments.quick else []
    with fresh_cache(converted=False):
        times["the same, nothing prepared"] = [_page(arguments, "auto")]
    results: list[Row] = [
        {"phase": name, "starts": len(taken), "median s": median(taken), "fastest s": min(taken),
         "slowest s": max(taken)}
        for name, taken in times.items()
    ]  # fmt: skip
    ready, tried, looked = (median(times[name]) for name in LIBRARY[1:])
    first = times["the same, nothing prepared"][0]
    claims = [
        claim("trying the models, s", tried, "at most 0.3", None if arguments.quick else tried <= 0.3),
        claim("a call's look, s", looked, "under 0.001", None if arguments.quick else looked < 0.001),
        claim("model ready, s", ready, "under 5", None if arguments.quick else ready < 5),
        claim("first start, s", first, "at most 45", None if arguments.quick else first <= 45),
        claim("different texts", len(texts), "1", len(texts) == 1),
    ]
    finish("start", arguments, CPU, results, claims)


def _library(pair: str) -> tuple[list[float], tuple[int, ...]]:
    """Return the seconds of each phase in LIBRARY, and the text."""
    command = [sys.executable, "-c", START, pair, PROMPT]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    times, written = json.loads(done.stdout.splitlines()[-1])
    return times, tuple(written)


def _page(arguments: argparse.Namespace, draft_length: str = "bass") -> float:
    begun = time.perf_counter()
    with app(arguments, draft_length):
        return time.perf_counter() - begun


def _first_page(arguments: argparse.Namespace) -> float:
    with fresh_cache():
        return _page(arguments, "auto")
