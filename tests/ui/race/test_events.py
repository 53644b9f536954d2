"""The page's generator event closes the race on every path, after which the page can start the next one."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
from collections.abc import Generator
from typing import Any

import pytest

from bass_core import BassError, ModelPair
from ui.page.events import UNEXPECTED, Events, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.local import race_source

from ..conftest import caches

SETTINGS = ("Hello", 2, 60, 0.9, 0)


def is_skip(update: Any) -> bool:
    """Whether this output stays unchanged on the page."""
    return update == {"__type__": "update"}


def phase(updates: tuple[Any, ...]) -> str:
    return str(json.loads(updates[3])["phase"])


def test_run_is_disabled_while_the_race_runs(pair: ModelPair) -> None:
    first, *middle, last = Events(race_source(pair), Limits()).run(*SETTINGS)
    assert phase(first) == "running" and all(map(is_skip, first[:3])) and first[4]["interactive"] is False
    assert middle and all(is_skip(update) for updates in middle for update in updates[3:])
    assert all(lane["finished"] for lane in json.loads(middle[-1][1])["lanes"].values())
    assert phase(last) == "done" and all(map(is_skip, last[:3])) and last[4]["interactive"] is True


def test_bad_input_changes_nothing_but_the_message(pair: ModelPair) -> None:
    (only,) = Events(race_source(pair), Limits()).run("", *SETTINGS[1:])
    assert phase(only) == "error" and "prompt is empty" in only[3]
    assert all(map(is_skip, only[:3])) and only[4]["interactive"] is True


def test_closing_the_event_frees_the_caches_at_once(pair: ModelPair) -> None:
    gc.collect()
    gc.disable()
    try:
        before = caches()
        running = Events(race_source(pair), Limits()).run("Hello", 4, 1000, 0.9, 0)
        next(running), next(running)
        assert caches() > before
        running.close()
        assert caches() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "says"), [(BassError("Too big: ask for less."), "Too big"), (KeyError("x"), UNEXPECTED)]
)
def test_an_error_inside_the_race_is_a_sentence_and_run_works_again(error: Exception, says: str) -> None:
    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        raise error
        yield {}

    *_, last = Events(source, Limits()).run(*SETTINGS)
    assert phase(last) == "error" and json.loads(last[3])["message"].startswith(says)
    assert last[4]["interactive"] is True


def test_the_status_line_says_while_costs_are_measured() -> None:
    device: Any = {"name": "toy", "kind": "cpu"}
    bare: Any = {"done": False, "scheduling": "fair", "elapsed_ms": 1.0, "lanes": {}, "device": device}
    lane = {"sequences": [], "metrics": {}, "rounds": [], "clock_ms": 0.0, "finished": False, "error": None}

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        yield bare | {"phase": "measuring"}
        yield bare | {"phase": "measuring", "lanes": {"one": lane}}
        yield bare | {"lanes": {"one": lane}}
        yield bare | {"lanes": {"one": lane}, "done": True}

    _, *middle, last = Events(source, Limits()).run(*SETTINGS)
    told = [None if is_skip(update[3]) else json.loads(update[3]) for update in middle]
    words = "Measuring once what a round costs on this machine"
    assert [one and (one["phase"], one["message"]) for one in told] == [
        ("running", words),
        None,
        ("running", ""),
        None,
    ]
    # Without lanes there is nothing to draw.
    assert [is_skip(update[0]) for update in middle] == [True, False, False, False] and phase(last) == "done"


def test_stop_leaves_run_to_the_end_of_the_cancelled_race(pair: ModelPair) -> None:
    status, button = Events(race_source(pair), Limits()).stop()
    assert json.loads(status)["phase"] == "stopped" and is_skip(button)


def test_the_source_is_fit_for_a_worker_that_pickles_what_goes_in_and_out(pair: ModelPair) -> None:
    """ZeroGPU forks a worker, which needs a sync generator function with plain data in and out."""
    source, request = (
        race_source(pair),
        make_request({"prompt": "Hello", "batch_size": 2, "max_new_tokens": 60}, Limits()),
    )
    assert inspect.isgeneratorfunction(source)
    assert pickle.loads(pickle.dumps(request)) == request
    *_, last = source(pickle.loads(pickle.dumps(request)))
    assert pickle.loads(pickle.dumps(last)) == json.loads(json.dumps(last))
