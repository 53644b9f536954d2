"""Input of a form or a script becomes a request, or is refused in one sentence."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from bass_core import (
    HARDWARE,
    PAIRS,
    Hardware,
    ModelPair,
    ModelSize,
    RequestError,
    SamplingParams,
    SimulatedClock,
    generate,
    race,
)
from bass_core.length.options import make_policy
from ui.page import clock as machine
from ui.page import clock as words
from ui.page.choices import Choices, draft_lengths
from ui.page.form import starting_values
from ui.page.limits import Limits
from ui.page.presets import presets
from ui.page.request import RaceRequest, make_request
from ui.page.setting import SETTINGS, shown
from ui.sweep.request import MAX_RACES, make_sweep

GOOD: dict[str, Any] = {
    "prompt": "Hello", "batch_size": 4, "max_new_tokens": 64, "temperature": 0.7, "seed": 0,
}  # fmt: skip


def asked(**given: Any) -> RaceRequest:
    return make_request(GOOD | given, Limits())


def test_good_input_becomes_the_arguments_of_race() -> None:
    request = asked(batch_size=2.0, seed=7.0, temperature=0, draft_length="5", time_budget_ms=1500, lanes=["bass"])
    assert (request.prompt, request.batch_size, request.seed, request.temperature) == ("Hello", 2, 7, 0.0)
    assert isinstance(request.batch_size, int)
    assert (request.draft_length, request.time_budget_ms, request.lanes) == (5, 1500.0, ("bass",))
    assert (request.top_k, request.top_p, request.scheduling, request.verification) == (0, 1.0, "fair", "auto")
    arguments = asked(top_k=5, pair="other").arguments()
    assert (arguments["prompt"], arguments["n"], arguments["sampling"]) == (
        "Hello",
        4,
        SamplingParams(0.7, top_k=5),
    )
    assert "pair" not in arguments and asked(pair="other").pair == "other"
    other = asked(
        min_p=0.1, repetition_penalty=1.2, stop="#", system="S", chat_template_kwargs={"a": 1}
    ).arguments()
    assert other["sampling"] == SamplingParams(0.7, min_p=0.1, repetition_penalty=1.2)
    assert (other["stop"], other["system"], other["chat_template_kwargs"]) == (("#",), "S", {"a": 1})
    assert request.settings()["lanes"] == list(request.arguments()["lanes"]) == ["bass"]


def test_a_draft_length_that_is_not_decimal_is_a_policy_name() -> None:
    """A superscript two is a digit for str.isdigit, but not for int(). The library refuses it."""
    for text in ("\u00b2", "\u2460", "five", ""):
        assert asked(draft_length=text).draft_length == text
        with pytest.raises(RequestError, match="draft_length must be"):
            make_policy(text)


def test_a_batch_has_one_row_per_prompt_line() -> None:
    request = asked(prompt="One\n\n  Two \r\nThree\n", prompts="lines", batch_size=7)
    assert request.arguments()["prompt"] == ["One", "Two", "Three"]
    assert request.batch_size == request.arguments()["n"] == request.settings()["batch_size"] == 3
    whole = asked(prompt="One\nTwo", batch_size=3)
    assert (whole.arguments()["prompt"], whole.batch_size) == ("One\nTwo", 3)
    single = asked(prompt=" One \n", prompts="lines", batch_size=7)
    assert (single.arguments()["prompt"], single.batch_size, single.prompts) == ("One", 7, "one")


OWN = {"clock": "own"}
SIZES = {"clock": "h100", "clock_models": "own"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": prompt}, "The prompt is empty") for prompt in ("", " \n", None)),
    ({"prompt": "x" * 20_001}, "has 20001 characters and this server takes at most 20000"),
    *(({"pair": pair}, "The pair must be a name") for pair in (7, "x" * 201)),
    ({"batch_size": 0}, "Batch size must be a whole number from 1 to 8"),
    ({"max_new_tokens": 0}, "Max new tokens must be a whole number from 1 to 1024"),
    *(({"lanes": lanes}, "at least one lane") for lanes in ([], "bass")),
    (
        {"prompt": "a\n" * 9, "prompts": "lines"},
        "There are 9 prompts, one per line, and this server takes at most 8",
    ),
    ({"prompt": " \n ", "prompts": "lines"}, "The prompt is empty"),
    *(({"prompts": kind}, 'prompts must be "one"') for kind in ("many", None, ["lines"])),
    ({"clock": "tpu"}, "clock must be one of measured, a100, h100, h200, b200, laptop, zerogpu, own; got 'tpu'."),
    ({"clock": None}, "clock must be one of"),
    ({"clock": "h100", "clock_models": "9b"}, "clock_models must be one of 7.8b, 1.7b, 70b, own; got '9b'."),
    (OWN | {"clock_bandwidth": 0}, "The memory bandwidth must be a number of GB/s above 0"),
    *(
        (OWN | {"clock_tflops": peak}, "The peak must be a number of TFLOP/s above 0")
        for peak in (None, float("inf"))
    ),
    (SIZES | {"clock_target": -1}, "The target's size must be a number"),
    (SIZES | {"clock_draft": "big"}, "The draft's size must be a number"),
    (SIZES | {"clock_bytes": [2]}, "The size of a weight must be a number"),
    ({"clock": "laptop", "clock_models": "70b"}, "do not fit"),
    ({"repetition_penalty": 0}, "Repetition penalty must be a number from 0.001 to 1000"),
    *(
        ({"stop": given}, "stop must be a list of at most 16 texts")
        for given in ([""], [3], 3, ["a"] * 17, ["a" * 201])
    ),
    ({"system": 3}, "system must be a text of at most"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    ({"json_schema": [1]}, "json_schema must be an object, and regex and grammar texts"),
    ({"json_schema": "{"}, "The JSON schema is not JSON (Expecting property name enclosed in double quotes"),
    ({"chat_template_kwargs": {"documents": [{"text": "a"}]}}, "change or leave out documents"),
    ({"chat_template_kwargs": {"tokenizer_kwargs": {"padding": True}}}, "change or leave out tokenizer_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}" * 40}}, "change or leave out chat_template"),
    ({"chat_template_kwargs": {"a": 2**60}}, "change or leave out a"),
]
REFUSED_SWEEPS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": " "}, "The prompt is empty"),
    ({"batches": [1, 9]}, "Each batch must be a whole number from 1 to 8"),
    *(({"batches": batches}, "batches must be a list") for batches in ([], "8")),
    ({"draft_lengths": []}, "draft_lengths must be a list"),
    ({"draft_lengths": ["17"]}, "A fixed draft length must be a whole number from 1 to 16"),
    ({"draft_lengths": [1.5]}, "A fixed draft length must be"),
    ({"seconds": 4}, "seconds must be a number from 5 to 600"),
    ({"seconds": "long"}, "seconds must be a number"),
    ({"batches": list(range(1, 9)), "draft_lengths": [1, 2, 3, 4, 5]}, f"at most {MAX_RACES}: name fewer"),
]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [(make_request, *row) for row in REFUSED] + [(make_sweep, *row) for row in REFUSED_SWEEPS],
)
def test_bad_input_is_refused_in_one_sentence(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        make(GOOD | given, Limits(max_batch=8))
    error = str(refusal.value)
    assert message in error and error.endswith(".") and "\n" not in error


def values(name: str, limits: Limits | None = None, choices: Choices | None = None) -> dict[str, object]:
    return starting_values(presets()[name], limits or Limits(), choices or Choices())


def test_a_preset_sets_the_whole_form_within_the_operators_limits() -> None:
    names = ["Repeat a text", "Write code", "Four questions", "A long document"]
    assert [name for name, preset in presets().items() if not preset.more] == names
    assert list(presets()) == [*names, "Unrelated words", "Fill in a form", "Tell a story", "On an H100"]
    few, requests = Limits(max_batch=2, max_new_tokens=16), {}
    unshown = {name: setting.default for name, setting in SETTINGS.items() if not setting.control}
    for name, preset in presets().items():
        form = values(name)
        assert list(form) == [setting.name for setting in shown()]
        requests[name] = make_request(form, Limits())
        length = str(requests[name].draft_length)  # the form has a list of texts
        assert (
            requests[name].settings() | {"draft_length": length} == unshown | form
            and preset.values.keys() <= SETTINGS.keys()
        )
        assert preset.look_for.endswith(".") and preset.look_for.count(".") == 1
        small = make_request(values(name, few), few)
        assert small.batch_size <= 2 and small.max_new_tokens == 16
    assert requests["Tell a story"].verification == "coupled" and requests["Tell a story"].temperature > 0
    # Only the preset "On an H100" sets a clock. The others set it to "measured".
    assert {name: request.clock for name, request in requests.items() if request.clock != "measured"} == {
        "On an H100": "h100"
    }
    # Settings that a preset leaves out have the operator's values. Values that a pair lacks become neutral ones.
    assert values("Tell a story", choices=Choices(draft_lengths=draft_lengths("bass")))["draft_length"] == "bass"
    assert values("Unrelated words")["drafter"] == "auto"
    choices = Choices(drafters=(("automatic", "auto"), ("the draft", "model")))
    assert values("Unrelated words", choices=choices)["drafter"] == "model"


def test_four_questions_run_each_row_with_its_own_prompt(pair: ModelPair) -> None:
    request = make_request(values("Four questions") | {"max_new_tokens": 6}, Limits())
    prompts = request.arguments()["prompt"]
    assert prompts == request.prompt.split("\n") and len(set(prompts)) == request.batch_size == 4
    *_, last = race(pair, **request.arguments())
    expected = [
        generate(pair, prompt, method="regular", max_new_tokens=6, sampling=SamplingParams(0))
        for prompt in prompts
    ]
    for lane in last["lanes"].values():
        assert [row["text"] for row in lane["sequences"]] == [output.sequences[0].text for output in expected]


def test_exactly_the_librarys_machines_and_pairs_are_offered() -> None:
    offered = [value for _, value in machine.CLOCKS if value not in (machine.MEASURED, machine.OWN)]
    assert offered == [name.lower() for name in HARDWARE]
    assert [value for _, value in machine.MODELS if value != machine.OWN] == [name.lower() for name in PAIRS]


def test_machine_settings_give_the_clock_and_its_code() -> None:
    measured = asked()
    assert machine.clock(vars(measured)) is machine.code(vars(measured)) is None
    assert "clock" not in measured.arguments() and measured.arguments()["synthetic_acceptance"] is None
    for models, draft in (("7.8b", "310m"), ("1.7b", "135m"), ("70b", "8b")):
        arguments = pickle.loads(
            pickle.dumps(asked(clock="h100", clock_models=models, acceptance=0.8))
        ).arguments()
        assert (
            arguments["clock"] == SimulatedClock("h100", models, draft)
            and arguments["synthetic_acceptance"] == 0.8
        )
    custom = {"clock": "own", "clock_models": "own", "clock_bandwidth": 500, "clock_tflops": 40}
    custom_clock = asked(**custom, clock_target=3, clock_draft=0.5, clock_bytes=0.5).arguments()["clock"]
    assert (custom_clock.machine.bandwidth, custom_clock.machine.flops) == (500, 40e12)
    assert [(model.parameters, model.cost.weight_bytes) for model in custom_clock.models] == [
        (3e9, 1.5e9),
        (5e8, 2.5e8),
    ]
    assert words.machine_of(custom_clock.record()) == "machine of 500 GB/s and 40 TFLOP/s with 3B and 500M"
    names = {"SimulatedClock": SimulatedClock, "Hardware": Hardware, "ModelSize": ModelSize}
    for clock, models in (("h100", "7.8b"), ("laptop", "own"), ("own", "own")):
        settings = vars(asked(clock=clock, clock_models=models))
        assert eval(str(machine.code(settings)), names) == machine.clock(settings)


def test_hidden_numbers_are_never_refused() -> None:
    for clock, models in (("measured", "own"), ("h100", "7.8b")):
        asked(clock=clock, clock_models=models, clock_bandwidth=-1, clock_target=None, clock_bytes=0)
