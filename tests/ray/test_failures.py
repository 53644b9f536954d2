"""A worker that dies, with a race and without one: one sentence, and it comes back while the other goes on."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from ui.sources.cluster.races import LOST
from ui.sources.source import Place, WorkerLost

from .conftest import asked, finishes, until, workers


def killed_in(running: Any) -> str:
    """Kill the worker that has this race; returns its name."""
    name: str = next(s for s in running if s["lanes"])["device"]["name"]
    busy = max(workers(), key=lambda one: one.cpu_percent(0.3))
    busy.kill()
    return name


def test_a_worker_that_dies_is_one_sentence_and_comes_back(place: Place) -> None:
    with closing(place.source(asked(1000))) as running:
        killed_in(running)
        with pytest.raises(WorkerLost) as lost:
            list(running)
    assert str(lost.value) == LOST and "\n" not in LOST
    assert finishes(place)  # by the other one
    until(lambda: len(workers()) == 2, "a second worker")
    with closing(place.source(asked(1000))) as first, closing(place.source(asked(1000))) as second:
        names = {next(s for s in one if s["lanes"])["device"]["name"] for one in (first, second)}
    assert len(names) == 2


def test_workers_that_die_while_nothing_runs_come_back(place: Place) -> None:
    for one in workers():
        one.kill()
    assert finishes(place)
    until(lambda: len(workers()) == 2, "both workers")
