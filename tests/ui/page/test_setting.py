"""A setting is one line of the table, from which the form, the API, the address and the request are made."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr
import pytest

from bass_core import ModelPair, SamplingParams
from ui.page.choices import COUPLED, NEAR_TIES, choices
from ui.page.events import Events, Snapshot
from ui.page.limits import Limits, whole
from ui.page.page import build
from ui.page.request import RaceRequest, make_request
from ui.page.setting import SETTINGS, Setting, shown

from ...models import tiny

TOY = Setting(
    "first_id", 3, int, whole(0, lambda _: 9), "first_id", "First id", "number", "of the sequences"
)  # fmt: skip


def nothing(request: RaceRequest) -> Generator[Snapshot, None, None]:
    yield from ()


def page() -> gr.Blocks:
    return build(nothing, limits=Limits(), about="nothing")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(SETTINGS, TOY.name, TOY)
    yield TOY.name


def parameters(blocks: gr.Blocks) -> dict[str, Any]:
    endpoint: Any = blocks.get_api_info()["named_endpoints"]["/race"]  # type: ignore[index]
    return {
        p["parameter_name"]: (p["python_type"]["type"], p["parameter_default"]) for p in endpoint["parameters"]
    }


def test_the_api_s_names_order_types_and_defaults_stay_what_they_are() -> None:
    assert list(parameters(page()).items()) == [
        ("prompt", ("str", "Write a Python function that reverses a string.")),
        ("batch_size", ("int", 4)),
        ("max_new_tokens", ("int", 64)),
        ("temperature", ("float", 0.7)),
        ("seed", ("int", 0)),
        ("top_k", ("int", 0)),
        ("top_p", ("float", 1.0)),
        ("draft_length", ("str", "auto")),
        ("drafter", ("str", "auto")),
        ("attention", ("str", "auto")),
        ("scheduling", ("str", "fair")),
        ("verification", ("str", "auto")),
        ("time_budget_ms", ("None | float", None)),
        ("lanes", ("None | list[str]", None)),
        ("pair", ("str", "")),
        ("prompts", ("str", "one")),
        ("clock", ("str", "measured")),
        ("clock_models", ("str", "7.8b")),
        ("clock_bandwidth", ("None | float", 1000.0)),
        ("clock_tflops", ("None | float", 100.0)),
        ("clock_target", ("None | float", 7.8)),
        ("clock_draft", ("None | float", 0.31)),
        ("clock_bytes", ("None | float", 2.0)),
        ("acceptance", ("None | float", None)),
    ]


def test_a_new_line_is_in_the_form_the_api_and_the_address(toy: str) -> None:
    made = page()
    assert list(parameters(made).items())[-1] == (toy, ("int", 3))
    (control,) = [b for b in made.blocks.values() if getattr(b, "elem_id", None) == "first-id"]
    assert isinstance(control, gr.Number)
    assert (control.label, control.value, control.info) == ("First id", 3, "of the sequences")
    (restored,) = [f.js for f in made.fns.values() if f.js and "Bass.restore(" in str(f.js)]
    assert f'"{toy}": {json.dumps({"control": "number", "choices": None})}' in str(restored)
    assert '"pair"' not in str(restored), "the form has no such control"
    (run,) = [f for f in made.fns.values() if len(f.inputs) == len(shown()) and f.fn is not None]
    assert run.inputs[-1] is control


def test_a_new_line_reaches_the_request_by_the_page_and_by_the_api(toy: str) -> None:
    asked: list[RaceRequest] = []

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        asked.append(request)
        yield from ()

    events = Events(source, Limits())
    values = [setting.default if setting.start is None else setting.start for setting in shown()]
    list(events.run(*values[:-1], 5))
    list(events.api(first_id=6))
    assert [request.arguments()[toy] for request in asked] == [5, 6]
    assert asked[0].settings()[toy] == 5
    *_, refused = events.run(*values[:-1], 10)
    assert "First id must be a whole number from 0 to 9." in refused[3]


def test_the_arguments_are_those_of_race() -> None:
    request = make_request({"prompt": "Hello", "batch_size": 2, "top_k": 5, "pair": "other"}, Limits())
    given = request.arguments()
    assert (given["prompt"], given["n"], given["sampling"]) == ("Hello", 2, SamplingParams(0.7, top_k=5))
    assert "pair" not in given and request.pair == "other"
    assert request.settings()["lanes"] == list(given["lanes"])


@pytest.mark.parametrize(
    ("low_precision", "words", "note"),
    [
        (False, "coupled: the same text in every lane", COUPLED),
        (True, "coupled: the same text, except at near ties", NEAR_TIES),
    ],
)
def test_equal_words_are_promised_only_where_sums_are_not_rounded_to_16_bits(
    low_precision: bool, words: str, note: str
) -> None:
    pair = ModelPair(tiny("llama"))
    pair.target_step.low_precision = low_precision
    made = choices(pair, "auto")
    assert (words, "coupled") in made.verifications and made.verification == note
