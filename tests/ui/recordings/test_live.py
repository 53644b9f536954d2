"""During a race the page goes back and returns to what came meanwhile; a recording needs no place in the queue."""

from __future__ import annotations

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from ..browser import LANES, fill, revealed, shown
from ..conftest import watched

pytestmark = pytest.mark.slow
STATE = "() => Bass.tape.state"


def begun(page: Page, count: int = 4) -> None:
    """Start a long race and wait until it has shown some instants."""
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function("(count) => Bass.tape.state.count > count && !Bass.tape.state.recorded", arg=count)


def test_the_page_goes_back_during_a_race_and_returns(page: Page) -> None:
    begun(page)
    page.evaluate("() => Bass.tape.jump(1)")
    state, before = page.evaluate(STATE), shown(page, "bass")
    assert state["away"] and state["now"] == 1
    # What the server sends waits, however long.
    page.wait_for_timeout(1500)
    assert shown(page, "bass") == before and page.evaluate(STATE) == state
    page.click("[data-tape=live]")
    page.wait_for_function("(count) => Bass.tape.state.count > count + 3", arg=state["count"])
    texts = shown(page, "bass")
    assert all(text.startswith(part) for text, part in zip(texts, before, strict=True)) and texts != before
    # The stepper holds the page; then the slider rests.
    page.click("[data-switch=stepping]")
    expect(page.locator(".scrubber input")).to_be_disabled()
    page.click("[data-switch=stepping]")
    expect(page.locator(".scrubber input")).to_be_enabled()
    # Stop shows the newest, and the run stays to go back in.
    page.evaluate("() => Bass.tape.jump(2)")
    page.click("#stop")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    state = page.evaluate(STATE)
    assert state["now"] == state["count"] - 1 and state["ended"] == "stopped" and not state["away"]
    page.evaluate("() => Bass.tape.jump(0)")
    expect(page.locator("#lane-bass .state")).not_to_have_text("Stopped")
    page.evaluate("() => Bass.tape.live()")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    # A new race is shown from its start, wherever the page was.
    page.evaluate("() => Bass.tape.jump(0)")
    expect(page.locator("#run")).to_be_enabled()
    fill(page, tokens=6)
    page.click("#run")
    expect(page.locator("#lane-bass .state")).to_contain_text("Finished", timeout=120_000)
    assert not page.evaluate(STATE)["away"]


def test_an_idle_page_plays_a_recording_while_another_race_has_the_device(
    context: BrowserContext, server: str
) -> None:
    job = Client(server, verbose=False).submit("Hello", 8, 1024, 0.9, 0, api_name="/race")
    next(iter(job))
    with watched(context, server) as page:
        page.click("[data-recording=win]")
        expect(page.locator(".recording-mark")).to_be_visible()
        expect(page.locator(".recording-about")).to_contain_text("Recorded: smollm2 on cpu")
        expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done")
        assert not job.done()
        for lane in LANES:
            expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
        expect(page.locator(".figures-table")).to_be_visible()
        recorded = shown(page, "bass")
        page.evaluate("() => Bass.tape.jump(1)")
        assert all(text.startswith(part) for text, part in zip(recorded, shown(page, "bass"), strict=True))
        page.click("[data-recording=loss]")
        page.wait_for_function("() => Bass.tape.state.recorded.name === 'loss' && Bass.tape.state.now > 1")
        # Run ends it, and the race is shown once the device is free.
        fill(page, tokens=6)
        page.click("#run")
        page.wait_for_function("() => !Bass.tape.state.playing")
        expect(page.locator("[data-recording=win]")).to_be_disabled()
        job.cancel()
        expect(page.locator(".recording-note")).to_be_hidden()
        expect(page.locator("#lane-bass .state")).to_contain_text("Finished")
        assert page.evaluate("() => Bass.asJson()").count("Hello") >= 1
        # Another recording, and back to the visitor's own race.
        revealed(page)
        own = {lane: shown(page, lane) for lane in LANES}
        page.click("[data-recording=win]")
        expect(page.locator("[data-back]")).to_be_visible()
        page.click("[data-back]")
        expect(page.locator(".recording-note")).to_be_hidden()
        assert {lane: shown(page, lane) for lane in LANES} == own
