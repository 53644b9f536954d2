"""`python -m bench placement`: ten small races behind one large one, in order of arrival and by expected work.

Contract: one worker of Ray with a tiny pair and the app's own queue, whose patience is 0 s in the first arm, which
is the order of arrival, and the default in the second. A first race holds the worker until all others wait; what
is measured is how long each then waits for its worker. Needs requirements-ray.txt.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from bass_core import Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.cluster.calls import Calls
from ui.sources.cluster.pool import Pool
from ui.sources.cluster.races import Races
from ui.sources.cluster.start import LocalRay
from ui.sources.queue import PATIENCE_S, Queue
from ui.sources.source import Ask

from ..report.report import claim, finish, median, parser
from ..robustness.serving import save_tiny_pair

SMALL = 10


def main(argv: list[str]) -> None:
    """Race in both orders, compare, print, and write."""
    options = parser("placement", __doc__ or "")
    options.add_argument("--max-new-tokens", type=int, default=1024, help="of the large race, which has 32 rows")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.max_new_tokens = 64
    arms = {"order of arrival": 0.0, "least work first": PATIENCE_S}
    waits = {name: _waits(patience, arguments.max_new_tokens) for name, patience in arms.items()}
    results = [
        {
            "order": name,
            "small races, median wait, s": median(small),
            "small races, longest wait, s": max(small),
            "large race, wait, s": large,
        }
        for name, (large, small) in waits.items()
    ]
    before, after = (median(small) for _, small in waits.values())
    longest = waits["least work first"][0]
    claims = [
        claim("median wait of a small race, after over before", after / before, "below 1", after < before),
        # Overtaken for a minute at most, and then behind the one race that has the worker.
        claim("seconds that the large race waited, by work", longest, f"at most {PATIENCE_S:g} and a small race",
              None if arguments.quick else longest <= PATIENCE_S + after),
    ]  # fmt: skip
    finish("placement", arguments, torch.device("cpu"), results, claims)


def _asked(tokens: int, rows: int) -> RaceRequest:
    given = {"prompt": "Hello", "batch_size": rows, "max_new_tokens": tokens, "temperature": 0, "draft_length": 3}
    return make_request(given, Limits())


def _waits(patience_s: float, tokens: int) -> tuple[float, list[float]]:
    """Seconds until a worker had the large race, and each of the small ones."""
    ray = LocalRay(1)
    calls = Calls(ray.ray)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target, draft = save_tiny_pair(Path(folder))
            ask = Ask(str(target), str(draft), device="cpu", dtype="float32", measures=False)
            pool = Pool(
                calls,
                ask,
                Limits(),
                workers=1,
                threads=1,
                options={"num_cpus": 1},
                queue=Queue(patience_s),
            )
            pool.start()
            return _race_all(Races(pool), tokens)
    finally:
        calls.close()
        ray.leave()


def _race_all(races: Races, tokens: int) -> tuple[float, list[float]]:
    waited: dict[int, float] = {}
    queued = threading.Barrier(SMALL + 2)

    def run(number: int, running: Generator[Snapshot, None, None]) -> None:
        next(running)  # it waits now
        queued.wait()
        start = time.monotonic()
        for snapshot in running:
            if snapshot["lanes"]:
                waited.setdefault(number, time.monotonic() - start)

    def queue(number: int, request: RaceRequest) -> threading.Thread:
        thread = threading.Thread(target=run, args=(number, races.source(request)))
        thread.start()
        time.sleep(0.05)  # so that they arrive in this order
        return thread

    with closing(races.source(_asked(1000, 32))) as first:
        next(one for one in first if one["lanes"])
        threads = [queue(0, _asked(tokens, 32)), *(queue(1 + i, _asked(16, 1)) for i in range(SMALL))]
        queued.wait()
    for thread in threads:
        thread.join()
    small: list[Any] = [waited[1 + i] for i in range(SMALL)]
    return waited[0], small
