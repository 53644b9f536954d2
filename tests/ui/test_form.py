"""The form in a browser: refusals, presets, the prompt's length, links.

The test uses one page throughout, so each part of the test starts from the state that the previous part left.
"""

from __future__ import annotations

import ast
import re

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from ui.page.presets import CODE, REWRITING, presets

from .browser import LANES, READY, fill, open_page, open_settings, run_to_the_end, shown

pytestmark = pytest.mark.slow
BAD_INPUT = [
    ({"prompt": "  "}, "The prompt is empty"),
    ({"prompt": "x" * 6000}, "shorten the prompt"),
    ({"batch": ""}, "Batch size must be a whole number from 1 to 32."),
    ({"temperature": -1}, "Temperature must be a number of 0 or more"),
]


def test_every_part_of_the_form_works(page: Page, context: BrowserContext) -> None:
    expect(page.locator("#prompt textarea")).to_have_value(REWRITING)
    expect(page.locator("#preset-note")).to_contain_text(presets()["Repeat a text"].look_for)
    expect(page.locator(".prompt-length")).to_have_text(f"{len(REWRITING)} of 4,096 tokens")
    _refusals(page)
    _presets(page)
    _lengths(page)
    _links(page, context)
    _long_example(page)


def _refusals(page: Page) -> None:
    """Bad input is refused in one sentence. The results of the last race and the typed values stay."""
    lines = "One.\nTwo."
    fill(page, prompt=lines, tokens=4)
    run_to_the_end(page)
    # The same text would now be two prompts.
    page.evaluate("(prompt) => Bass.form(['prompt', 'prompts'], [prompt, 'lines'])", lines)
    expect(page.locator(".of-lanes")).to_contain_text("your last race with one prompt for all rows.")
    before = [shown(page, lane) for lane in LANES]
    for bad, message in BAD_INPUT:
        typed = {"prompt": "Hello", "batch": 2, "tokens": 4, "temperature": 0.9, "seed": 3} | bad
        fill(page, **typed)  # type: ignore[arg-type]
        # On a busy machine, Gradio takes over a typed text a moment later.
        page.wait_for_timeout(500)
        page.click("#run")
        expect(page.locator(".message")).to_contain_text(message)
        expect(page.locator("#run")).to_be_enabled()
        assert [shown(page, lane) for lane in LANES] == before
        expect(page.locator(".of-lanes")).to_have_text(
            re.compile("The lanes still show your last race with .* The form is for the next race.")
        )
        assert page.input_value("#prompt textarea") == typed["prompt"]
        for name, field in (("batch-size", "batch"), ("temperature", "temperature"), ("seed", "seed")):
            assert page.input_value(f"#{name} input") == str(typed[field])


def _presets(page: Page) -> None:
    """A preset sets the whole form. "Four questions" has one prompt per row, and the snippet has the prompts."""
    note, coupled = page.locator("#preset-note"), "coupled: the same text in every lane"
    open_settings(page)
    expect(page.get_by_role("button", name="Tell a story")).to_be_hidden()
    page.get_by_role("button", name="More", exact=True).click()
    expect(page.get_by_role("button", name="More", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Tell a story").click()
    expect(page.locator("#verification input")).to_have_value(coupled)
    page.fill("#top-k input", "3")
    expect(note).to_have_text("")
    page.get_by_role("button", name="Four questions").click()
    expect(note).to_contain_text(presets()["Four questions"].look_for)
    expect(page.locator("#top-k input")).to_have_value("0")
    expect(page.locator("#verification input")).not_to_have_value(coupled)
    expect(page.locator("#prompts input")).to_have_value("one prompt per line")
    expect(page.locator("#batch-size input")).to_have_value("4")
    expect(page.locator("#temperature input")).to_have_value("0")
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


def _lengths(page: Page) -> None:
    """The line below the prompt shows the length of the field's text."""
    line, field = page.locator(".prompt-length"), page.locator("#prompt textarea")
    expect(line).to_contain_text("4 prompts, the longest 72 of 4,096 tokens")
    page.get_by_role("button", name="Repeat a text").click()
    expect(field).to_have_value(REWRITING)
    _an_edited_prompt(page)
    for text, message in (
        ("Hello", "5 of 4,096 tokens"),
        ("x" * 5000, "has 5000 tokens and the model holds 4096"),
        ("y" * 200_000, "has 200000 characters and this server takes at most 20000"),
    ):
        field.fill(text)
        expect(line).to_contain_text(message)
    field.fill("")
    expect(line).to_have_text("")
    # If the text changes quickly, the line shows the length of the last one.
    page.get_by_role("button", name="Tell a story").click()
    field.press_sequentially(" And more.", delay=20)
    page.get_by_role("button", name="Write code").click()
    expect(field).to_have_value(CODE)
    expect(line).to_have_text(f"{len(CODE)} of 4,096 tokens")


def _an_edited_prompt(page: Page) -> None:
    """The fixed draft length of a preset ends with its prompt, but one that the visitor has chosen stays."""
    field, length = page.locator("#prompt textarea"), page.locator("#draft-length input")
    expect(length).to_have_value("fixed, 3")
    field.press_sequentially("!")
    expect(length).to_have_value("automatic: by measured cost")
    length.click()
    page.get_by_role("option", name="fixed, 2", exact=True).click()
    field.press_sequentially("!")
    page.wait_for_timeout(300)
    expect(length).to_have_value("fixed, 2")
    # A text that comes in one piece, as from the clipboard, is an edit too.
    for edit in (lambda: field.press_sequentially("!"), lambda: field.fill("A text of my own")):
        page.get_by_role("button", name="Repeat a text").click()
        expect(field).to_have_value(REWRITING)
        expect(length).to_have_value("fixed, 3")
        edit()
        expect(length).to_have_value("automatic: by measured cost")
        expect(page.locator("#preset-note")).to_have_text("")


def _links(page: Page, context: BrowserContext) -> None:
    """A link restores the settings that this server knows, and so do back and forward."""
    fill(page, batch=3, tokens=4, seed=11)
    run_to_the_end(page)
    page.click("[data-take=link]")
    assert "#race?" in page.url and "seed=11" in page.url
    # Back from a section of "How it works", the race is still there.
    page.evaluate("() => { window.stays = true; location.hash = '#what-speedup'; }")
    page.go_back()
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.stays && Bass.run().done") and "#race?" in page.url
    address = page.url.replace("draft_length=auto", "draft_length=4").replace("scheduling=fair", "scheduling=x")
    other = context.new_page()
    open_page(other, address)
    open_settings(other)
    expect(other.locator("#seed input")).to_have_value("11")
    expect(other.locator("#prompt textarea")).to_have_value("Hello")
    expect(other.locator("#batch-size input")).to_have_value("3")
    expect(other.locator("#draft-length input")).to_have_value("fixed, 4")
    expect(other.locator("#scheduling input")).to_have_value(re.compile("fair"))
    # Another link in the same tab, then back: each reloads the page.
    with other.expect_event("load"):
        other.evaluate("location.hash = '#race?seed=12&lanes=nonsense'")
    _seed_is(other, "12")
    expect(other.get_by_role("checkbox", name="BASS")).to_be_checked()
    with other.expect_event("load"):
        other.go_back(wait_until="commit")
    _seed_is(other, "11")
    other.close()


def _seed_is(page: Page, value: str) -> None:
    """Open the settings, since loading a link closes them, and wait until they have this seed."""
    page.wait_for_function(READY)
    open_settings(page)
    expect(page.locator("#seed input")).to_have_value(value)


def _long_example(page: Page) -> None:
    """The long example shows its prefill, and stores its prompt once."""
    page.get_by_role("button", name="A long document").click()
    expect(page.locator("#batch-size input")).to_have_value("8")
    expect(page.locator(".prompt-length.refused")).to_contain_text("the model holds 4096")
    # A token of the tiny model is one ASCII character, so 3000 characters fit into its context.
    fill(page, prompt=page.input_value("#prompt textarea")[:3000], batch=8, tokens=8)
    expect(page.locator(".prompt-length:not(.refused)")).to_contain_text(" of 4,096 tokens")
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
    assert any(re.fullmatch(rf"Reading the prompt: .* of {count} tokens", words) for words in seen), seen
    expect(page.locator("#lane-bass .read")).to_have_text("")
    expect(page.locator("#lane-bass .read-bar")).to_be_hidden()
    page.locator("[data-chart=cache]").scroll_into_view_if_needed()
    plot = "document.querySelector('[data-chart=cache] .plot')"
    page.wait_for_function(f"() => {plot}.data?.length")
    bars = page.evaluate(f"{plot}.data.map((trace) => [trace.name, trace.y])")
    memory = {name: dict(zip(LANES, y, strict=True)) for name, y in bars if name}
    assert list(memory) == ["Shared", "Rows' own", "Draft", "As copies"]
    once = sum(memory[part]["bass"] for part in ("Shared", "Rows' own", "Draft"))
    assert memory["As copies"]["bass"] > 6 * once
    assert memory["As copies"]["speculative"] is None, "it has one row at a time"
