"""A preset sets the whole form, and a batch may have one prompt a line."""

from __future__ import annotations

import ast

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, RequestError, SamplingParams, generate, race
from ui.page.choices import Choices, draft_lengths
from ui.page.form import starting
from ui.page.limits import Limits
from ui.page.presets import FIRST, REWRITING, presets
from ui.page.request import make_request
from ui.page.setting import SETTINGS
from ui.page.setting import shown as controls

from ..browser import run_to_the_end, shown

NAMES = ["Wins", "Break-even", "Loses", "Same words", "Ragged", "On an H100", "Long document"]


def values(name: str, limits: Limits | None = None, choices: Choices | None = None) -> dict[str, object]:
    return starting(presets()[name], limits or Limits(), choices or Choices())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_every_setting_of_the_form_and_is_a_valid_request(name: str) -> None:
    given = values(name)
    assert list(given) == [setting.name for setting in controls()]
    assert make_request(given, Limits()).settings() == {"pair": ""} | given
    assert presets()[name].values.keys() <= SETTINGS.keys()
    sentence = presets()[name].look_for
    assert sentence.endswith(".") and sentence.count(".") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_to_the_operator_s_limits(name: str) -> None:
    few = Limits(max_batch=2, max_new_tokens=16)
    request = make_request(values(name, few), few)
    assert request.batch_size <= 2 and request.max_new_tokens == 16


def test_the_presets_are_what_they_are_called() -> None:
    assert list(presets()) == NAMES and FIRST == "Wins"
    made = {name: make_request(values(name), Limits()) for name in NAMES}
    assert made["Same words"].verification == "coupled" and made["Same words"].temperature > 0
    # One asks for a clock, and each other one sets it back.
    assert {name: one.clock for name, one in made.items() if one.clock != "measured"} == {"On an H100": "h100"}


def test_a_preset_that_names_no_draft_length_has_the_operator_s() -> None:
    assert values("Wins", choices=Choices(draft_lengths=draft_lengths("bass")))["draft_length"] == "bass"


def test_a_value_that_this_pair_lacks_is_the_neutral_one() -> None:
    assert values("Loses")["drafter"] == "auto"
    known = Choices(drafters=(("automatic", "auto"), ("the draft", "model")))
    assert values("Loses", choices=known)["drafter"] == "model"


def test_ragged_runs_each_row_with_its_own_prompt(pair: ModelPair) -> None:
    request = make_request(values("Ragged") | {"max_new_tokens": 6, "temperature": 0}, Limits())
    prompts = request.arguments()["prompt"]
    assert prompts == request.prompt.split("\n") and len(set(prompts)) == request.batch_size == 4
    *_, last = race(pair, **request.arguments())
    alone = [
        generate(pair, one, method="regular", max_new_tokens=6, sampling=SamplingParams(0.0)) for one in prompts
    ]
    for lane in last["lanes"].values():
        assert [row["text"] for row in lane["sequences"]] == [out.sequences[0].text for out in alone]


def test_the_batch_has_as_many_rows_as_prompts() -> None:
    request = make_request({"prompt": "One\n\n  Two \r\nThree\n", "prompts": "lines", "batch_size": 7}, Limits())
    assert request.arguments()["prompt"] == ["One", "Two", "Three"]
    assert request.batch_size == request.arguments()["n"] == request.settings()["batch_size"] == 3
    whole = make_request({"prompt": "One\nTwo", "batch_size": 3}, Limits())
    assert (whole.arguments()["prompt"], whole.batch_size) == ("One\nTwo", 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"prompt": "a\nb\nc", "prompts": "lines"},
            "There are 3 prompts, one a line, and this server takes at most 2",
        ),
        ({"prompt": " \n ", "prompts": "lines"}, "The prompt is empty"),
        ({"prompt": "a", "prompts": "many"}, 'prompts must be "one"'),
        ({"prompt": "a", "prompts": None}, 'prompts must be "one"'),
        ({"prompt": "a", "prompts": ["lines"]}, 'prompts must be "one"'),
    ],
)
def test_bad_prompts_get_one_sentence(given: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        make_request({"batch_size": 1} | given, Limits(max_batch=2))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_one_preset_after_another_leaves_nothing_behind(page: Page) -> None:
    note, batch, temperature = (
        page.locator(at) for at in ("#preset-note", "#batch-size input", "#temperature input")
    )
    expect(page.locator("#prompt textarea")).to_have_value(REWRITING)
    expect(note).to_contain_text(presets()["Wins"].look_for)
    page.click("text=More settings")
    page.get_by_role("button", name="Same words").click()
    expect(page.locator("#verification input")).to_have_value(
        "coupled: the same text in every lane", timeout=60_000
    )
    page.fill("#top-k input", "3")
    expect(note).to_have_text("")
    page.get_by_role("button", name="Ragged").click()
    expect(note).to_contain_text(presets()["Ragged"].look_for)
    expect(page.locator("#top-k input")).to_have_value("0")
    expect(page.locator("#verification input")).not_to_have_value("coupled: the same text in every lane")
    expect(page.locator("#prompts input")).to_have_value("one prompt a line")
    expect(batch).to_have_value("4")
    expect(temperature).to_have_value("0.7")
    run_to_the_end(page)
    assert len(shown(page, "bass")) == 4
    code = page.locator(".snippet code").text_content() or ""
    prompts = {
        node.targets[0].id: node.value
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }["prompt"]
    assert ast.literal_eval(prompts) == page.input_value("#prompt textarea").split("\n")
    assert 'generate(pair, prompt[i], method="speculative"' in code
    assert 'generate(pair, prompt, method="bass"' in code
