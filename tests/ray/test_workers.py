"""Races on Ray's workers: the library's texts, several at once, stopped, queued, and what each worker says."""

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
from ui.sources.source import Ask, Service

from .conftest import asked, until


def library(ask: Ask, request: RaceRequest) -> dict[str, list[str]]:
    """What the library writes in this process."""
    pair = load_pair(ask.pair, draft=ask.draft, device="cpu", dtype="float32")
    *_, last = race(pair, **request.arguments())
    return lane_texts(last)


def test_two_races_at_once_are_the_librarys_and_name_their_workers(place: Service, ask: Ask) -> None:
    requests, last = [asked(seed=1), asked(seed=2)], {}

    def run(number: int) -> None:
        *_, last[number] = place.source(requests[number])

    # Each holds its worker from its first snapshot until both have begun.
    began = [place.source(asked(1000, seed=seed)) for seed in (8, 9)]
    devices = {next(s["device"]["name"] for s in one if s["lanes"]) for one in began}
    assert {name.split(", worker ")[1].split()[0] for name in devices} == {"1", "2"}
    for one in began:
        one.close()
    together(*(partial(run, number) for number in range(2)))
    for number, request in enumerate(requests):
        assert last[number]["done"] and lane_texts(last[number]) == library(ask, request)


def test_a_third_race_waits_and_is_told_its_place(place: Service) -> None:
    with closing(place.source(asked(1000))) as first, closing(place.source(asked(1000))) as second:
        for running in (first, second):
            next(s for s in running if s["lanes"])
        third = place.source(asked())
        told: Any = next(third)
        assert (told["phase"], told["place"], told["lanes"]) == ("waiting", 1, {})
        first.close()
        *_, last = third
        assert last["done"]


def test_a_slow_reader_holds_the_worker_back(place: Service) -> None:
    with closing(place.source(asked(1000))) as running:
        first = next(s for s in running if s["lanes"])
        time.sleep(3.0)  # some thirty snapshots' time
        later = list(islice(running, AHEAD + 2))
    # What was made ahead is AHEAD snapshots and the one that was being made.
    elapsed = [s["elapsed_ms"] for s in later]
    assert elapsed[AHEAD - 1] - first["elapsed_ms"] < 2000 and not later[-1]["done"]


def test_a_stopped_race_frees_its_worker(place: Service) -> None:
    for _ in range(3):
        for running in (place.source(asked(1000)), place.source(asked(1000))):
            next(s for s in running if s["lanes"])
            running.close()
    *_, last = place.source(asked(seed=3))
    assert last["done"]


def test_a_race_that_is_closed_while_it_waits_is_forgotten(place: Service) -> None:
    with closing(place.source(asked(1000))) as first, closing(place.source(asked(1000))) as second:
        for running in (first, second):
            next(s for s in running if s["lanes"])
        gone = place.source(asked())
        next(gone)
        gone.close()
        waits: Any = place.source(asked())
        assert next(waits)["place"] == 1
        waits.close()


def test_a_refusal_of_the_library_is_its_own_sentence(place: Service) -> None:
    with pytest.raises(RequestError, match="method must be one of") as refusal:
        list(place.source(asked(lanes=["guess"])))
    assert "\n" not in str(refusal.value)
    *_, last = place.source(asked())
    assert last["done"]


def test_the_prompts_length_is_counted_beside_the_races(place: Service) -> None:
    assert place.count is not None
    with closing(place.source(asked(1000))) as running:
        next(s for s in running if s["lanes"])
        until(lambda: place.count is not None and "5 of" in place.count("Hello", False), "the prompt's length")
    computed_by = "transformers' own model (our kernels take 16 bits and fewer)"
    assert place.facts.about.endswith(f"on cpu, float32, 1 thread, {computed_by}, 2 workers on Ray")
