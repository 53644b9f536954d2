"""That a race's texts are exact, on the page: tokens equal to Regular's, or 1,000 draws of one token."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, race
from ui.page.limits import Limits
from ui.page.request import make_request

from .browser import assert_accessible, assert_fits, exported, fill, play, run_to_the_end

pytestmark = pytest.mark.slow
# Notes when the button, which is disabled while the server draws, is enabled again.
ANSWERED = """() => {
  const button = document.querySelector("#draws-ask");
  new MutationObserver(() => (window.answered ||= !button.disabled))
    .observe(button, { attributeFilter: ["disabled"] });
}"""


def test_the_verdict_counts_the_tokens_that_equal_regulars(opened: Page, pair: ModelPair) -> None:
    """The count comes from the tokens of the race, also if one of them differs."""
    *_, final = race(pair, "Hello", n=2, max_new_tokens=20, inspect=True)
    line = opened.locator(".verdict-exact")
    settings = make_request({"prompt": "Hello", "temperature": 0.0}, Limits()).settings()
    play(opened, [final], settings)
    total = sum(len(sequence["token_ids"]) for sequence in final["lanes"]["regular"]["sequences"])
    expect(line).to_have_text(f"{total} of {total} tokens equal to Regular’s")
    changed: Any = copy.deepcopy(json.loads(json.dumps(final)))
    changed["lanes"]["bass"]["sequences"][1]["token_ids"][3] += 1
    play(opened, [changed], settings)
    expect(line).to_have_text(
        f"Speculative: {total} of {total} tokens, BASS: {total - 1} of {total} tokens equal to Regular’s"
    )
    expect(opened.locator(".verdict-draws")).to_be_hidden()


def test_a_sampled_race_offers_draws_of_one_token(page: Page) -> None:
    fill(page, batch=2, tokens=24, temperature=0.9)
    run_to_the_end(page)
    expect(page.locator(".verdict-exact")).to_be_empty()
    asked = json.loads(page.evaluate("() => Bass.drawsQuestion()[0]"))
    regular = exported(page)["lanes"]["regular"]["sequences"]
    least = min(
        (step["next_p"], row, step["start"])
        for row, sequence in enumerate(regular)
        for step in sequence["steps"]
        if step["start"] and step["next_p"] is not None
    )
    assert (asked["row"], len(asked["tokens"])) == least[1:]
    assert asked["tokens"] == regular[least[1]]["token_ids"][: least[2]]
    page.click(".verdict-draws")
    line, rows = page.locator(".draws-line"), page.locator(".draws-table tbody tr")
    expect(line).to_contain_text("χ²", timeout=120_000)
    expect(line).to_contain_text("Same distribution.")
    expect(page.locator("#draws-ask")).to_be_enabled()
    expect(page.locator(".draws")).to_be_in_viewport()
    for column in (2, 3):
        drawn = [int(row.locator("td").nth(column - 1).text_content() or "") for row in rows.all()]
        assert sum(drawn) == 1000
    shares = [float((row.locator("td").first.text_content() or "").split()[0]) for row in rows.all()]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert_fits(page, 390, 1400)
    assert_accessible(page)
    # An answer is not shown below another run. Here, that run is a copy of the same race.
    page.evaluate(ANSWERED)
    copied = "{ ...JSON.parse(Bass.tape.asRecording({ about: '', made: {} })), head: Bass.run().head }"
    load = f"Bass.tape.load({copied}, {{ name: 'copy' }}); Bass.tape.live();"
    page.evaluate(f"() => {{ document.querySelector('.verdict-draws').click(); {load} }}")
    page.wait_for_function("() => window.answered")
    expect(page.locator(".draws")).to_be_hidden()


def test_a_page_without_a_model_offers_no_draws(film: Page) -> None:
    film.click("[data-recording=loss]")
    film.wait_for_function("() => Bass.tape.state.recorded.name === 'loss'")
    film.evaluate("() => Bass.tape.live()")
    expect(film.locator("#lane-bass .state")).to_contain_text("Finished")
    assert film.evaluate("() => Bass.drawsQuestion()[0]") != ""
    expect(film.locator(".verdict-draws")).to_be_hidden()
    film.click("[data-recording=win]")
    film.wait_for_function("() => Bass.tape.state.recorded.name === 'win'")
    film.evaluate("() => Bass.tape.live()")
    expect(film.locator(".verdict-exact")).to_have_text("172 of 172 tokens equal to Regular’s")
