"""The sweep's events race a real pair: figures that the races give again, freed memory, sentences, predictions."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import torch

from bass_core import BassError, ModelPair, Snapshot, load_pair
from bass_core.attention.cache import RaggedCache
from bass_core.lanes import lane as lanes
from bass_core.machine.hardware import Peaks
from bench.machine import Machine
from ui.page.events import UNEXPECTED, Events
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.page.setting import shown
from ui.sources.local import race_source
from ui.sources.source import Source
from ui.sweep.events import SweepEvents
from ui.sweep.measure import measured
from ui.sweep.request import make_sweep

# A value for each setting of the form: a prompt, and four numbers; the others have their defaults.
FORM = [{"prompt": "Hello", "temperature": 0.9, "lanes": None}.get(one.name, one.default) for one in shown()]


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path]) -> Iterator[ModelPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    torch.set_num_threads(threads)


def events(source: Source, **limits: Any) -> SweepEvents:
    return SweepEvents(Events(source, Limits(**limits)))


def states(updates: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [json.loads(text) for text, _ in updates]


def caches() -> int:
    return sum(type(thing) is RaggedCache for thing in gc.get_objects())


def test_figures_are_those_of_the_races_that_were_run(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed from the last snapshot of each race, without the page's own sums."""
    peaks, last = Peaks(1e9, 2e10), {}
    monkeypatch.setattr(lanes, "known_peaks", lambda *_: peaks)
    source = race_source(pair)

    def kept(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for snapshot in source(request):
            last[request.batch_size, request.draft_length, request.seed] = snapshot
            yield snapshot

    given = {"prompt": "Hello", "temperature": 0.9, "batches": [1, 3], "draft_lengths": ["bass", 3], "seconds": 5}
    *_, sweep = measured(make_sweep(given | {"max_new_tokens": 30}, Limits()), kept, Limits())
    assert [(one["batch"], one["draft_length"]) for one in sweep["points"]] == [
        (1, "bass"),
        (1, 3),
        (3, "bass"),
        (3, 3),
    ]
    for one in sweep["points"]:
        races = [shot["lanes"] for key, shot in last.items() if key[:2] == (one["batch"], one["draft_length"])]
        times, tokens = {"regular": 0.0, "bass": 0.0}, {"regular": 0, "bass": 0}
        for race in races:
            for name, lane in race.items():
                prefill = sum(record["time_ms"] for record in lane["rounds"] if record["kind"] == "prefill")
                times[name] += lane["clock_ms"] - prefill
                tokens[name] += sum(len(row["token_ids"]) - 1 for row in lane["sequences"])
        each = {name: one["batch"] * times[name] / tokens[name] for name in times}
        assert one["ms_per_token"] == pytest.approx(each["bass"], rel=0.01)
        assert one["regular_ms_per_token"] == pytest.approx(each["regular"], rel=0.01)
        assert one["speedup"] == pytest.approx(each["regular"] / each["bass"], rel=0.01)
        assert 0 <= one["acceptance"] <= 1 and one["error"] > 0 and one["rounds"] > 0
    regular = last[1, "bass", 0]["lanes"]["regular"]
    cost, machine = pair.target_step.cost, Machine(peaks.bandwidth, peaks.flops)
    prompt = len(pair.tokenizer("Hello")["input_ids"])
    exact = [
        machine.ridge(cost, 1, prompt + len(regular["sequences"][0]["token_ids"]) * share) for share in (0, 1)
    ]
    # Between the ridges at the shortest and the longest context of its steps.
    assert min(exact) * 0.99 <= sweep["ridge"]["tokens"] <= max(exact) * 1.01


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
