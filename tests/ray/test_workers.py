"""Races on Ray's workers: the library's texts, several at once, stopped, queued, and their messages."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import pytest

from bass_core import RequestError, load_pair, race
from tests.support.page import lane_texts
from tests.support.threads import together
from ui.page.request import RaceRequest
from ui.sources.cluster.races import AHEAD
from ui.sources.source import PairOptions, Service

from .conftest import race_request, until

pytestmark = pytest.mark.slow


def library_texts(ask: PairOptions, request: RaceRequest) -> dict[str, list[str]]:
    """Return the texts that the library writes in this process."""
    pair = load_pair(ask.pair, draft=ask.draft, device="cpu", dtype="float32")
    *_, last = race(pair, **request.arguments())
    return lane_texts(last)


def test_two_races_at_once_write_the_library_s_texts_and_name_their_workers(
    service: Service, ask: PairOptions
) -> None:
    requests, last = [race_request(seed=1), race_request(seed=2)], {}

    def run(number: int) -> None:
        *_, last[number] = service.source(requests[number])

    # From its first snapshot on, each race has a worker. Keep both workers busy until both races have begun.
    began = [service.source(race_request(1000, seed=seed)) for seed in (8, 9)]
    devices = {next(s["device"]["name"] for s in running if s["lanes"]) for running in began}
    assert {name.split(", worker ")[1].split()[0] for name in devices} == {"1", "2"}
    for running in began:
        running.close()
    together(*(partial(run, number) for number in range(2)))
    for number, request in enumerate(requests):
        assert last[number]["done"] and lane_texts(last[number]) == library_texts(ask, request)


def test_a_third_race_waits_and_gets_its_place_in_the_queue(service: Service) -> None:
    with (
        closing(service.source(race_request(1000))) as first,
        closing(service.source(race_request(1000))) as second,
    ):
        for running in (first, second):
            next(s for s in running if s["lanes"])
        third = service.source(race_request())
        snapshot: Any = next(third)
        assert (snapshot["phase"], snapshot["place"], snapshot["lanes"]) == ("waiting", 1, {})
        first.close()
        *_, last = third
        assert last["done"]


def test_a_worker_waits_for_a_slow_reader(service: Service) -> None:
    with closing(service.source(race_request(1000))) as running:
        first = next(s for s in running if s["lanes"])
        time.sleep(3.0)  # enough time for about thirty snapshots
        later = list(islice(running, AHEAD + 2))
    # The worker is at most AHEAD snapshots ahead, plus the one it was making.
    elapsed = [s["elapsed_ms"] for s in later]
    assert elapsed[AHEAD - 1] - first["elapsed_ms"] < 2000 and not later[-1]["done"]


def test_a_stopped_race_frees_its_worker(service: Service) -> None:
    for _ in range(3):
        for running in (service.source(race_request(1000)), service.source(race_request(1000))):
            next(s for s in running if s["lanes"])
            running.close()
    *_, last = service.source(race_request(seed=3))
    assert last["done"]


def test_a_race_that_is_closed_while_waiting_leaves_the_queue(service: Service) -> None:
    with (
        closing(service.source(race_request(1000))) as first,
        closing(service.source(race_request(1000))) as second,
    ):
        for running in (first, second):
            next(s for s in running if s["lanes"])
        closed = service.source(race_request())
        next(closed)
        closed.close()
        waiting: Any = service.source(race_request())
        assert next(waiting)["place"] == 1
        waiting.close()


def test_a_refusal_of_the_library_keeps_its_sentence(service: Service) -> None:
    with pytest.raises(RequestError, match="method must be one of") as refusal:
        list(service.source(race_request(lanes=["guess"])))
    assert "\n" not in str(refusal.value)
    *_, last = service.source(race_request())
    assert last["done"]


def test_the_prompt_s_length_is_counted_while_races_run(service: Service) -> None:
    assert service.count is not None
    with closing(service.source(race_request(1000))) as running:
        next(s for s in running if s["lanes"])
        until(lambda: service.count is not None and "5 of" in service.count("Hello", False), "the prompt's length")
    computed_by = "transformers' own model (our kernels take 16 bits and fewer)"
    assert service.facts.about.endswith(f"on cpu, float32, 1 thread, {computed_by}, 2 workers on Ray")
