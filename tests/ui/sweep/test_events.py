"""The sweep's events race a real pair: figures that the races give again, freed memory, sentences, predictions."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Generator
from typing import Any

import gradio as gr
import pytest

from bass_core import BassError, ModelPair, Snapshot
from ui.page.events import UNEXPECTED, Events
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.page.setting import shown
from ui.sources.local import race_source
from ui.sources.source import Source
from ui.sweep.events import SweepEvents

from ..conftest import caches

# A value for each setting of the form: a prompt, and four numbers; the others have their defaults.
FORM = [{"prompt": "Hello", "temperature": 0.9, "lanes": None}.get(one.name, one.default) for one in shown()]


def events(source: Source, **limits: Any) -> SweepEvents:
    return SweepEvents(Events(source, Limits(**limits)))


def states(updates: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [json.loads(text) for text, _ in updates]


def test_the_button_is_disabled_while_it_runs_and_points_come_one_by_one(pair: ModelPair) -> None:
    first, *middle, last = events(race_source(pair), max_batch=2, max_seconds=6).measure(3, *FORM)
    assert first[1]["interactive"] is False and json.loads(first[0])["sweep"] is None
    told = states(middle)
    assert [len(state["sweep"]["points"]) for state in told][-1] == 6
    assert {state["phase"] for state in told} == {"running"} and len({state["run"] for state in told}) == 1
    assert last[1]["interactive"] is True and states([last])[0]["phase"] == "done"
    assert [line["label"] for line in told[-1]["sweep"]["lines"]] == [
        "Algorithm 1", "automatic, by measured cost", "fixed length 3",
    ]  # fmt: skip
    assert told[-1]["sweep"]["sentences"] and math.isfinite(told[-1]["sweep"]["points"][0]["speedup"])


def test_closing_the_event_frees_the_caches_at_once(pair: ModelPair) -> None:
    gc.collect()
    gc.disable()
    try:
        before = caches()
        running = events(race_source(pair)).measure(4, *FORM)
        while caches() == before:
            next(running)
        running.close()
        assert caches() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("fixed", "prompt", "says"),
    [
        (4, "", "The prompt is empty"),
        (0, "Hello", "A fixed draft length must be"),
        (None, "Hello", "A fixed draft"),
    ],
)
def test_bad_input_is_a_sentence(fixed: Any, prompt: str, says: str) -> None:
    *_, (text, button) = events(never).measure(fixed, prompt, *FORM[1:])
    state = json.loads(text)
    assert state["phase"] == "error" and state["message"].startswith(says) and button["interactive"] is True


def never(request: RaceRequest) -> Generator[Snapshot, None, None]:
    raise AssertionError("no race was asked for")
    yield


@pytest.mark.parametrize(
    ("error", "says"), [(BassError("Too big: ask for less."), "Too big"), (KeyError("x"), UNEXPECTED)]
)
def test_an_error_inside_a_race_keeps_the_points(pair: ModelPair, error: Exception, says: str) -> None:
    source = race_source(pair)

    def breaking(request: RaceRequest) -> Generator[Snapshot, None, None]:
        if request.batch_size > 1:
            raise error
        yield from source(request)

    *_, (text, button) = events(breaking, max_seconds=6).measure(4, *FORM)
    state = json.loads(text)
    assert state["phase"] == "error" and state["message"].startswith(says) and button["interactive"] is True
    assert [one["batch"] for one in state["sweep"]["points"]] == [1, 1, 1]
    with pytest.raises(gr.Error, match=says[:7]):
        list(events(breaking).api("Hello", batches=[2], draft_lengths=[4]))


def predicted(*values: Any) -> dict[str, Any]:
    return dict(json.loads(events(never).predict(*values)))


def test_a_prediction_runs_no_model_and_names_what_it_assumes() -> None:
    state = predicted(4, "A100", "7.8B", "0.8", "given")
    sweep = state["sweep"]
    assert sweep["kind"] == "predicted" and sweep["done"] and sweep["device"] == "A100 with 7.8B and 310M"
    assert (
        [one["batch"] for one in sweep["points"][::3]] == [1, 2, 4, 8, 16, 32, 64] == sweep["settings"]["batches"]
    )
    assert sweep["points"][9]["speedup"] > 2, "batch 8 under Algorithm 1"
    words = " ".join(sweep["assumptions"])
    assert "chance 0.80, as given" in words and "80 % of the bandwidth and 60 % of the FLOP/s" in words
    assert "A100 Tensor Core GPU" in words and "predicted costs" in words
    assumed = predicted(4, "A100", "7.8B", "", "assumed")["sweep"]
    assert assumed["points"] == sweep["points"] and "0.80, assumed" in assumed["assumptions"][0]
    swept = predicted(4, "A100", "7.8B", "0.61", "sweep")["sweep"]
    assert "0.61, measured in the last sweep" in swept["assumptions"][0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((17, "A100", "7.8B", "", ""), "A fixed draft length must be"),
        ((4, "abacus", "7.8B", "", ""), "hardware must be one of"),
        ((4, "A100", "9b", "", ""), "The models must be one of"),
        ((4, "laptop", "70B", "", ""), "70B and 8B do not fit"),
        ((4, "A100", "7.8B", "high", ""), "Acceptance must be a number from 0 to 1"),
        ((4, "A100", "7.8B", "1.2", ""), "Acceptance must be"),
        ((4, "A100", "7.8B", "nan", ""), "Acceptance must be"),
    ],
)
def test_a_bad_prediction_is_a_sentence(values: tuple[Any, ...], says: str) -> None:
    state = predicted(*values)
    assert state["phase"] == "error" and state["message"].startswith(says) and state["sweep"] is None
