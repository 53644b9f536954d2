"""The event of Run: its updates, its errors, its memory, and its limits on models and time."""

from __future__ import annotations

import inspect
import json
import pickle
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from bass_core import BassError, ModelPair, RequestError, load_pair
from tests.support.memory import alive, frees_at_once
from ui.page.events import UNEXPECTED, Events, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.local import Models, race_source
from ui.sources.source import waiting

SETTINGS = ("Hello", 2, 60, 0.9, 0)


def is_skip(update: Any) -> bool:
    """Whether this update leaves its output on the page unchanged."""
    return update == {"__type__": "update"}


def phase(updates: tuple[Any, ...]) -> str:
    return str(json.loads(updates[3])["phase"])


def test_run_is_disabled_during_a_race_and_bad_input_changes_only_the_message(
    pair: ModelPair,
) -> None:
    events = Events(race_source(pair), Limits())
    first, *middle, last = events.run(*SETTINGS)
    assert phase(first) == "running" and all(map(is_skip, first[:3])) and first[4]["interactive"] is False
    assert middle and all(is_skip(update) for updates in middle for update in updates[3:])
    assert all(lane["finished"] for lane in json.loads(middle[-1][1])["lanes"].values())
    assert phase(last) == "done" and all(map(is_skip, last[:3])) and last[4]["interactive"] is True
    (only,) = events.run("", *SETTINGS[1:])
    assert phase(only) == "error" and "prompt is empty" in only[3]
    assert all(map(is_skip, only[:3])) and only[4]["interactive"] is True
    # Stop does not enable Run. The page enables Run when the cancelled race has ended.
    status, button = events.stop()
    assert json.loads(status)["phase"] == "stopped" and is_skip(button)


def test_closing_the_event_frees_the_caches_at_once(pair: ModelPair) -> None:
    with frees_at_once() as before:
        running = Events(race_source(pair), Limits()).run("Hello", 4, 1000, 0.9, 0)
        next(running), next(running)
        assert alive() > before
        running.close()


@pytest.mark.parametrize(
    ("error", "message"), [(BassError("Too big: ask for less."), "Too big"), (KeyError("x"), UNEXPECTED)]
)
def test_an_error_during_a_race_is_one_sentence_and_run_works_again(error: Exception, message: str) -> None:
    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        raise error
        yield {}

    *_, last = Events(source, Limits()).run(*SETTINGS)
    assert phase(last) == "error" and json.loads(last[3])["message"].startswith(message)
    assert last[4]["interactive"] is True


def test_the_status_line_shows_that_costs_are_being_measured() -> None:
    device: Any = {"name": "toy", "kind": "cpu"}
    no_lanes: Any = {"done": False, "scheduling": "fair", "elapsed_ms": 1.0, "lanes": {}, "device": device}
    lane = {"sequences": [], "metrics": {}, "rounds": [], "clock_ms": 0.0, "finished": False, "error": None}

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        yield no_lanes | {"phase": "measuring"}
        yield no_lanes | {"phase": "measuring", "lanes": {"one": lane}}
        yield no_lanes | {"lanes": {"one": lane}}
        yield no_lanes | {"lanes": {"one": lane}, "done": True}

    _, *middle, last = Events(source, Limits()).run(*SETTINGS)
    statuses = [None if is_skip(update[3]) else json.loads(update[3]) for update in middle]
    words = "Measuring the cost of a round on this machine, once"
    assert [status and (status["phase"], status["message"]) for status in statuses] == [
        ("running", words),
        None,
        ("running", ""),
        None,
    ]
    # Without lanes, nothing is drawn.
    assert [is_skip(update[0]) for update in middle] == [True, False, False, False] and phase(last) == "done"


def test_requests_and_snapshots_can_be_pickled_for_a_worker(pair: ModelPair) -> None:
    """A ZeroGPU worker needs a sync generator function that takes and yields plain data."""
    source, request = (
        race_source(pair),
        make_request({"prompt": "Hello", "batch_size": 2, "max_new_tokens": 60}, Limits()),
    )
    assert inspect.isgeneratorfunction(source)
    assert pickle.loads(pickle.dumps(request)) == request
    *_, last = source(pickle.loads(pickle.dumps(request)))
    assert pickle.loads(pickle.dumps(last)) == json.loads(json.dumps(last))


def test_other_models_are_refused_without_a_lookup(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bass_core.model.loading.catalogue.locate", lambda *_: pytest.fail("the name was looked up")
    )
    events = Events(race_source(pair), Limits())
    for name in ("/etc", "../secrets", "owner/model", "smollm2-1.7b", "~"):
        with pytest.raises(RequestError, match="--allow-any-model"):
            Models(pair).get(name)
        with pytest.raises(gr.Error, match="races only its own pair"):
            list(events.api("Hello", 1, 4, 0, 0, pair=name))


def test_an_allowed_model_is_loaded_once_and_unloaded_for_the_next(
    pair: ModelPair, pair_folders: tuple[Path, Path]
) -> None:
    loaded: list[str] = []

    def load(name: str) -> ModelPair:
        loaded.append(name)
        return load_pair(name, device="cpu", dtype="float32")

    models = Models(pair, load)
    other = models.get(str(pair_folders[1]))
    assert (
        models.get(str(pair_folders[1])) is other and models.get("") is pair and loaded == [str(pair_folders[1])]
    )
    with pytest.raises(BassError, match="no pair and no folder"):
        models.get("nothing here")
    *_, last = Events(race_source(pair, models), Limits()).api("Hello", 1, 4, 0, 0, pair=str(pair_folders[1]))
    assert last["done"] and loaded == [str(pair_folders[1]), "nothing here", str(pair_folders[1])]


def test_a_race_ends_at_the_operators_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def endless(request: RaceRequest) -> Generator[Snapshot, None, None]:
        try:
            while True:
                now[0] += 1
                yield {"done": False, "lanes": {}, "device": {}}
        finally:
            closed.append(True)

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events = Events(endless, Limits(max_seconds=5))
    answers = events.api()
    *_, before, last = (next(answers) for _ in range(6))
    assert last == {**before, "done": True, "phase": "error", "error": last["error"]}
    with pytest.raises(gr.Error, match="stopped after 5 s, this server's limit") as error:
        next(answers)
    assert last["error"] == error.value.message
    assert now[0] == 5 and closed == [True]
    *_, last = events.run("Hello", 1, 4, 0, 0)
    assert json.loads(last[3])["phase"] == "error" and closed == [True, True]


def test_waiting_does_not_count_towards_the_time_limit() -> None:
    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for place in (2, 1):
            time.sleep(0.2)
            yield waiting(place, None)
        yield {**waiting(0, None), "done": True}

    events = Events(source, Limits(max_seconds=0.1))
    assert [snapshot["done"] for snapshot in events.api("Hello", 1, 4, 0, 0)] == [False, False, True]
