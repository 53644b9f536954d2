"""A worker that dies, with a race and without one: one sentence, and it comes back while the other goes on."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psutil
import pytest

from ui.sources.cluster.races import LOST
from ui.sources.source import Service, WorkerLost

from .conftest import asked, finishes, until, workers


def kill_the_busy_one(running: Any) -> None:
    """Kill the worker that has this race: the one that has worked most since the race began."""
    before = {one: spent(one) for one in workers()}
    for _ in range(5):
        next(running)
    max(before, key=lambda one: spent(one) - before[one]).kill()


def spent(process: psutil.Process) -> float:
    """Seconds of CPU time."""
    times = process.cpu_times()
    return float(times.user + times.system)


def test_a_worker_that_dies_is_one_sentence_and_comes_back(place: Service) -> None:
    with closing(place.source(asked(1000))) as running:
        kill_the_busy_one(running)
        with pytest.raises(WorkerLost) as lost:
            list(running)
    assert str(lost.value) == LOST and "\n" not in LOST
    assert finishes(place)  # by the other one
    until(lambda: len(workers()) == 2, "a second worker")
    with closing(place.source(asked(1000))) as first, closing(place.source(asked(1000))) as second:
        names = {next(s for s in one if s["lanes"])["device"]["name"] for one in (first, second)}
    assert len(names) == 2


def test_workers_that_die_while_nothing_runs_come_back(place: Service) -> None:
    for one in workers():
        one.kill()
    assert finishes(place)
    until(lambda: len(workers()) == 2, "both workers")
