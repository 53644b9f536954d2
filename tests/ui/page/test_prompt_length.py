"""The prompt's length is shown in the model's own tokens, and the long example is as long as it is meant to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from bass_core import ModelPair, RequestError, count_tokens, race
from ui.page import presets
from ui.page.choices import Choices
from ui.page.limits import Limits
from ui.page.page import build
from ui.page.presets import CODE, long_document
from ui.page.request import make_request
from ui.sources.local import prompt_count, race_source

from ...models import byte_tokenizer, tiny
from ..browser import fill, run_to_the_end


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair(tiny("llama"), tokenizer=byte_tokenizer())


def said(pair: ModelPair, prompt: object, limits: Limits | None = None) -> tuple[str, bool]:
    count = prompt_count(pair, limits or Limits())
    assert count is not None
    told = json.loads(count(prompt))  # type: ignore[arg-type]
    return told["text"], told["refused"]


def test_the_long_example_has_about_3000_tokens_and_is_accepted(smollm2_folder: Path) -> None:
    # The real tokenizer and sizes, with a model that is quick to make.
    config = AutoConfig.from_pretrained(smollm2_folder)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 18, 8, 1
    config.head_dim = 2
    real = ModelPair(LlamaForCausalLM(config), tokenizer=AutoTokenizer.from_pretrained(smollm2_folder))
    assert 2500 <= count_tokens(real, long_document()) <= 3500
    assert said(real, long_document())[0].endswith(" of 8,192 tokens")


@pytest.mark.parametrize("characters", [11_000, 7_500])
def test_the_long_example_never_ends_inside_code(characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "LONGEST_TEXT", characters)
    assert "## The page" in long_document() and long_document().count("```") % 2 == 0


def test_a_count_is_that_of_the_request(pair: ModelPair) -> None:
    assert said(pair, "Hello") == (f"{count_tokens(pair, 'Hello')} of 512 tokens", False)
    for empty in ("", " \n", None, 7):
        assert said(pair, empty) == ("", False)


@pytest.mark.parametrize(
    ("prompt", "limits"), [("x" * 600, Limits()), ("x" * 20, Limits(max_prompt=9)), ("\ud800", Limits())]
)
def test_what_would_be_refused_is_said_in_the_same_words(pair: ModelPair, prompt: str, limits: Limits) -> None:
    with pytest.raises(RequestError) as refusal:
        race(pair, make_request({"prompt": prompt}, limits).prompt)
    assert said(pair, prompt, limits) == (str(refusal.value), True)


def test_without_a_tokenizer_there_is_no_line(pair: ModelPair) -> None:
    bare = ModelPair(tiny("llama"))
    assert prompt_count(bare, Limits()) is None
    for source in (pair, bare):
        page = build(
            race_source(source), limits=Limits(), about="", choices=Choices(), count=prompt_count(source, Limits())
        )
        lines = [block for block in page.blocks.values() if getattr(block, "elem_id", None) == "prompt-length"]
        assert len(lines) == (source is pair)


def test_the_line_follows_the_field(page: Page) -> None:
    line, field = page.locator(".prompt-length"), page.locator("#prompt textarea")
    expect(line).to_have_text(f"{len(field.input_value())} of 4,096 tokens")
    field.fill("Hello")
    expect(line).to_have_text("5 of 4,096 tokens")
    field.fill("x" * 5000)
    expect(line).to_contain_text("has 5000 tokens and the model holds 4096")
    field.fill("y" * 200_000)
    expect(line).to_contain_text("has 200000 characters and this server takes at most 20000")
    field.fill("")
    expect(line).to_have_text("")
    # The last text counts, whatever came before it.
    page.get_by_role("button", name="Same words").click()
    field.press_sequentially(" And more.", delay=20)
    page.get_by_role("button", name="Break-even").click()
    expect(field).to_have_value(CODE)
    expect(line).to_have_text(f"{len(CODE)} of 4,096 tokens")
    page.get_by_role("button", name="Ragged").click()
    expect(line).to_contain_text("4 prompts, the longest 50 of 4,096 tokens")


@pytest.mark.slow
def test_the_long_example_shows_its_reading_and_holds_its_prompt_once(page: Page) -> None:
    page.get_by_role("button", name="Long document").click()
    expect(page.locator("#batch-size input")).to_have_value("8")
    expect(page.locator(".prompt-length.refused")).to_contain_text("the model holds 4096")
    # The tiny model's tokens are ASCII characters: this much of the text fits its context.
    fill(page, prompt=page.input_value("#prompt textarea")[:3000], batch=8, tokens=8)
    expect(page.locator(".prompt-length")).to_contain_text(" of 4,096 tokens")
    count = page.inner_text(".prompt-length").split()[0]
    page.evaluate(
        """() => {
          const seen = window.seen = new Set(), lane = document.querySelector("#lane-bass");
          const said = (part) => lane.querySelector(part).textContent;
          const look = () => seen.add(`${said(".state")}: ${said(".read")}`);
          new MutationObserver(look).observe(lane, { childList: true, subtree: true, characterData: true });
        }"""
    )
    run_to_the_end(page)
    seen = page.evaluate("[...window.seen]")
    assert any(one.startswith("Reading the prompt: ") and one.endswith(f" of {count} tokens") for one in seen), (
        seen
    )
    expect(page.locator("#lane-bass .read")).to_have_text("")
    expect(page.locator("#lane-bass .read-bar")).to_be_hidden()
    page.locator("[data-chart=cache]").scroll_into_view_if_needed()
    plot = "document.querySelector('[data-chart=cache] .plot')"
    page.wait_for_function(f"() => {plot}.data?.length")
    bars = page.evaluate(f"{plot}.data.map((trace) => [trace.name, trace.x.length, trace.y])")
    names = [name for name, _, _ in bars if name]
    assert names == ["Shared", "Rows' own", "Draft", "As copies"]
    held = {name: dict(zip(("regular", "speculative", "bass"), y, strict=True)) for name, _, y in bars if name}
    once = sum(held[part]["bass"] for part in names[:3])
    assert held["As copies"]["bass"] > 6 * once
    assert held["As copies"]["speculative"] is None, "it has one row at a time"
