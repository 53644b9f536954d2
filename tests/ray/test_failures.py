"""A worker that dies, during a race or not, is reported in one sentence and replaced; the other goes on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
import pytest

from ui.sources.cluster import pool
from ui.sources.cluster.races import LOST
from ui.sources.source import PairOptions, Service, WorkerLost

from .conftest import PATIENCE_S, finishes, race_request, until, workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ask(ask: PairOptions) -> PairOptions:
    """Let a worker without a race rest, so that `kill_busy_worker` can find the other one."""
    return replace(ask, measures=False)


def kill_busy_worker(running: Any) -> None:
    """Kill the worker that runs this race: it uses most CPU time, once the other has settled."""
    used: dict[psutil.Process, float] = {}
    while not used or min(used.values()) > max(used.values()) / 4:
        before = {worker: cpu_seconds(worker) for worker in workers()}
        for _ in range(5):
            next(running)
        used = {worker: cpu_seconds(worker) - seconds for worker, seconds in before.items()}
    max(used, key=lambda worker: used[worker]).kill()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_a_worker_that_dies_gives_a_one_sentence_error_and_is_replaced(service: Service) -> None:
    with closing(service.source(race_request(1000))) as running:
        kill_busy_worker(running)
        with pytest.raises(WorkerLost) as lost:
            list(running)
    assert str(lost.value) == LOST and "\n" not in LOST
    assert finishes(service)  # on the other worker
    until(lambda: len(workers()) == 2, "a second worker")
    with (
        closing(service.source(race_request(1000))) as first,
        closing(service.source(race_request(1000))) as second,
    ):
        names = {next(s for s in running_race if s["lanes"])["device"]["name"] for running_race in (first, second)}
    assert len(names) == 2


def test_workers_that_die_without_a_race_are_replaced(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BACK_S", PATIENCE_S)  # other tests keep the cores busy
    for worker in workers():
        worker.kill()
    assert finishes(service)
    until(lambda: len(workers()) == 2, "both workers")
