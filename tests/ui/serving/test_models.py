"""Which models a visitor may race, and how long a race may take."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path

import gradio as gr
import pytest

import app
from bass_core import BassError, ModelPair, RequestError, load_pair
from ui.page.events import Events, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.local import Models, race_source
from ui.sources.source import waiting


@pytest.mark.parametrize("name", ["/etc", "../secrets", "owner/model", "smollm2-1.7b", "~"])
def test_no_other_model_is_looked_for_unless_allowed(
    pair: ModelPair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bass_core.model.loading.catalogue.locate", lambda *_: pytest.fail("the name was looked up")
    )
    events = Events(race_source(pair), Limits())
    with pytest.raises(RequestError, match="--allow-any-model"):
        Models(pair).get(name)
    with pytest.raises(gr.Error, match="races only its own pair"):
        list(events.api("Hello", 1, 4, 0, 0, pair=name))
    assert app.parse([]).allow_any_model is False


def test_an_allowed_model_is_loaded_once_and_leaves_for_the_next(
    pair: ModelPair, tiny_pair: tuple[Path, Path]
) -> None:
    loaded: list[str] = []

    def load(name: str) -> ModelPair:
        loaded.append(name)
        return load_pair(name, device="cpu", dtype="float32")

    models = Models(pair, load)
    other = models.get(str(tiny_pair[1]))
    assert models.get(str(tiny_pair[1])) is other and models.get("") is pair and loaded == [str(tiny_pair[1])]
    with pytest.raises(BassError, match="no pair and no folder"):
        models.get("nothing here")
    *_, last = Events(race_source(pair, models), Limits()).api("Hello", 1, 4, 0, 0, pair=str(tiny_pair[1]))
    assert last["done"] and loaded == [str(tiny_pair[1]), "nothing here", str(tiny_pair[1])]


def test_a_race_ends_when_the_operators_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(gr.Error, match="stopped after 5 s, this server's limit"):
        list(events.api())
    assert now[0] == 5 and closed == [True]
    *_, last = events.run("Hello", 1, 4, 0, 0)
    assert json.loads(last[3])["phase"] == "error" and closed == [True, True]


def test_a_password_comes_from_the_environment_alone() -> None:
    assert app.credentials({}) is None and app.credentials({"BASS_PASSWORD": ""}) is None
    assert app.credentials({"BASS_PASSWORD": "secret"}) == ("bass", "secret")


def test_the_operators_time_does_not_run_while_a_race_waits() -> None:
    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for place in (2, 1):
            time.sleep(0.2)
            yield waiting(place, None)
        yield {**waiting(0, None), "done": True}

    events = Events(source, Limits(max_seconds=0.1))
    assert [snapshot["done"] for snapshot in events.api("Hello", 1, 4, 0, 0)] == [False, False, True]
