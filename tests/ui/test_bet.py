"""The bet before a race, and the line that compares it with the verdict."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .browser import assert_accessible, assert_fits, fill, run_to_the_end
from .conftest import watched

pytestmark = pytest.mark.slow

HEADS = {
    "BASS was fastest: 2.08× the speed of Regular, and 3.42× Speculative.":
        "You said Regular. Fastest: BASS, 2.08×.",
    "Regular was fastest: 1.20× the speed of BASS, which came next.": "You said Regular. Fastest: Regular, 1.20×.",
    "BASS and Speculative were level, ahead of Regular: the difference of 3 % may be chance.":
        "You said Regular. BASS and Speculative were level.",
    # As older versions wrote it.
    "BASS is ahead: 2.00× the speed of Regular.": "You said Regular. Fastest: BASS, 2.00×.",
}  # fmt: skip


def test_a_bet_on_a_recording_is_compared_with_its_verdict(context: BrowserContext, shelf: str) -> None:
    """On a page without a model, presenter mode asks before a recording plays."""
    with watched(context, f"{shelf}/?present=1") as page:
        bet, line = page.locator(".bet"), page.locator(".bet-line")
        expect(page.get_by_role("button", name="Bet first")).to_have_attribute("aria-pressed", "true")
        page.click("#run")
        expect(bet).to_contain_text("Which finishes first, and by how much?")
        expect(page.locator(".bet-lane")).to_have_text(["aRegular", "bSpeculative", "cBASS"])
        assert page.evaluate("() => Bass.run()") is None
        assert_fits(page, 390, 1400)
        assert_accessible(page)
        page.keyboard.press("a")
        expect(bet).to_be_hidden()
        expect(line).to_contain_text("You said Regular. Fastest: BASS, ")
        head = page.locator(".verdict-head").inner_text()
        expect(line).to_have_text(f"You said Regular. Fastest: BASS, {head.split(': ')[1].split(' ')[0]}.")
        # Going back in the race hides the outcome, and its end shows it again.
        page.evaluate("() => Bass.tape.jump(1)")
        expect(line).to_have_text("")
        page.evaluate("() => Bass.tape.live()")
        expect(line).to_contain_text("You said Regular. Fastest: BASS, ")
        for head, words in HEADS.items():
            page.evaluate("(head) => Bass.tell('view', {...Bass.run().view, verdict: {head, lanes: {}}})", head)
            expect(line).to_have_text(words)


def test_whoever_plays_a_recording_is_not_asked_any_more(context: BrowserContext, shelf: str) -> None:
    with watched(context, f"{shelf}/?present=1") as page:
        page.click("#run")
        expect(page.locator(".bet")).to_be_visible()
        page.click("[data-recording=win]")
        expect(page.locator(".bet")).to_be_hidden()
        for part in (".verdict", ".axis-lanes", "#lane-bass .sequence >> nth=0"):
            expect(page.locator(part)).to_be_visible()


def test_escape_closes_an_explanation_and_nothing_else(context: BrowserContext, shelf: str) -> None:
    with watched(context, f"{shelf}/?present=1") as page:
        explained = page.locator(":popover-open")

        def explain() -> None:
            page.click("#lane-bass h2 .term")
            expect(explained).to_have_count(1)
            page.keyboard.press("Escape")
            expect(explained).to_have_count(0)

        page.click("#run")
        explain()
        expect(page.locator(".bet")).to_be_visible()
        assert page.evaluate("() => Bass.run()") is None
        page.keyboard.press("c")
        page.click("[data-switch=stepping]")
        explain()
        expect(page.locator(".step-part")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".step-part")).to_be_hidden()
        page.click(".present-line")
        explain()
        expect(page.locator(".present-line")).to_have_attribute("aria-expanded", "true")


def test_the_switch_asks_before_each_race(page: Page) -> None:
    fill(page, tokens=12)
    run_to_the_end(page)
    expect(page.locator(".bet")).to_be_hidden()
    expect(page.locator(".bet-line")).to_have_text("")
    page.get_by_role("button", name="Bet first").click()
    # A key is typed into a field, and answers the question elsewhere.
    page.click("#run")
    expect(page.locator(".bet")).to_be_visible()
    # The last race's answer is hidden.
    for part in (".verdict", ".axis-lanes", "#lane-bass [data-figure=speedup]"):
        expect(page.locator(part)).to_be_hidden()
    page.locator("#prompt textarea").press_sequentially("b")
    expect(page.locator(".bet")).to_be_visible()
    page.locator(".bet-lane").nth(1).click()
    run_to_the_end(page, running=True)
    expect(page.locator(".bet-line")).to_contain_text("You said Speculative. ")
    # Escape starts the race without a bet, and the next race asks again.
    page.click("#run")
    expect(page.locator(".bet")).to_be_visible()
    page.keyboard.press("Escape")
    run_to_the_end(page, running=True)
    expect(page.locator(".bet-line")).to_have_text("")
    # A refused race keeps no bet.
    fill(page, temperature=-1)
    page.click("#run")
    page.keyboard.press("a")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "error")
    fill(page, tokens=12)
    page.click("#run")
    expect(page.locator(".bet")).to_be_visible()
    page.get_by_role("button", name="Bet first").click()
    expect(page.locator(".bet")).to_be_hidden()
    run_to_the_end(page)
    expect(page.locator(".bet-line")).to_have_text("")
