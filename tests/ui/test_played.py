"""A run can be rewound to any instant, saved and played, with the same texts, rounds and figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from ui.page.choices import DRAFT_LENGTH_WORDS
from ui.recordings.recording import load

from .browser import LANES, assert_fits, choose_option, fill, revealed, run_to_the_end, shown, texts_are
from .conftest import serving, watched

pytestmark = pytest.mark.slow
SLIDER = ".axis-slider"
# EXPORT: the run as the page stores it. CHARTS: the newest data of its charts, without the run's name.
EXPORT = "() => JSON.parse(Bass.asJson())"
KEEP_CHARTS = "() => Bass.on('charts', (charts) => (window.newest = charts))"
CHARTS = "() => { const { run, ...rest } = window.newest; return rest; }"
TAPE = "() => JSON.parse(Bass.tape.asRecording({ about: 'a test', made: {} }))"
STATE, AT = "() => Bass.tape.state", "() => Bass.tape.state.now"
# The figures and states of the lanes, the verdict and the summary.
PARTS = ".lane .figures, .lane .state, .verdict, .figures-table"
# Only a page with a model offers to draw tokens. A hidden offer leaves an empty line.
_OFFER = r"/\s*Same distribution\?|\n(?=\n)/g"
WORDS = f"() => [...document.querySelectorAll('{PARTS}')].map((e) => e.innerText.replace({_OFFER}, ''))"


def test_a_race_can_be_rewound_saved_and_played_without_a_model(
    page: Page, context: BrowserContext, tmp_path: Path
) -> None:
    page.evaluate(KEEP_CHARTS)
    # Long enough for many snapshots on a fast machine.
    fill(page, tokens=250)
    run_to_the_end(page)
    page.wait_for_function("() => Bass.tape.state.count > 5")
    _back_and_forth(page)
    _slider(page)
    _saved(page, context, tmp_path)


def show_instant(page: Page, i: int) -> None:
    """Show instant `i`, and wait until it is drawn."""
    page.evaluate("(i) => Bass.tape.jump(i)", i)
    page.wait_for_function("() => new Promise((done) => Bass.soon(() => done(true)))")


def _back_and_forth(page: Page) -> None:
    """Earlier instants show a part of the run, and Live shows all of it."""
    texts, words, export = {lane: shown(page, lane) for lane in LANES}, page.evaluate(WORDS), page.evaluate(EXPORT)
    charts, count = page.evaluate(CHARTS), page.evaluate("() => Bass.tape.state.count")
    page.select_option("[data-pick=lane]", "speculative")
    page.select_option("[data-pick=sequence]", index=1)
    expect(page.locator("[data-tape=live]")).to_be_hidden()
    lengths = []
    for i in (0, count // 2, 1, count - 2):
        show_instant(page, i)
        assert page.evaluate(AT) == i
        earlier = page.evaluate(EXPORT)
        for lane in LANES:
            now = shown(page, lane)
            assert all(whole.startswith(part) for whole, part in zip(texts[lane], now, strict=True))
            assert now == [entry["text"] for entry in earlier["lanes"][lane]["sequences"]]
            assert page.evaluate("(lane) => Bass.run().view.lanes[lane].metrics.new_tokens", lane) == (
                sum(len(entry["token_ids"]) for entry in earlier["lanes"][lane]["sequences"])
            )
            # No rounds and no points of charts are later than the instant.
            clock = earlier["lanes"][lane]["clock_ms"]
            rounds = [entry["time_ms"] for entry in earlier["lanes"][lane]["rounds"]]
            assert rounds == [entry["time_ms"] for entry in export["lanes"][lane]["rounds"]][: len(rounds)]
            points = page.evaluate(CHARTS)["lanes"][lane]["clock_ms"]
            assert points == charts["lanes"][lane]["clock_ms"][: len(points)] and max(points) <= clock + 1e-3
        lengths.append(len(rounds))
        expect(page.locator(".bass-summary")).to_be_hidden()
    assert lengths[0] < lengths[1] < lengths[3]
    # The reader's choices stay.
    assert (
        page.input_value("[data-pick=lane]") == "speculative" and page.input_value("[data-pick=sequence]") == "1"
    )
    page.click("[data-tape=live]")
    texts_are(page, export)
    expect(page.locator(".bass-summary")).to_be_visible()
    page.wait_for_function(f"(words) => JSON.stringify(({WORDS})()) === JSON.stringify(words)", arg=words)
    assert page.evaluate(EXPORT) == export and page.evaluate(CHARTS) == charts


def _slider(page: Page) -> None:
    """The playhead follows the pointer, keys and Play."""
    slider, ms, end = page.locator(SLIDER), "() => Bass.tape.state.ms", page.evaluate("() => Bass.tape.state.end")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"(end) => ({ms})() < end", arg=end)
    expect(page.locator(".axis-words")).to_contain_text(" of ")
    page.keyboard.press("Home")
    page.wait_for_function(f"() => ({ms})() === 0")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => ({ms})() > 0")
    slider.click()
    page.wait_for_function(f"(end) => ({ms})() > 0.4 * end && ({ms})() < 0.6 * end", arg=end)
    page.click("[data-speed='1']")
    page.wait_for_function("() => Bass.tape.state.now === Bass.tape.state.count - 1")
    expect(page.locator("[data-tape=play]")).to_have_text("Replay")
    assert not page.evaluate("() => Bass.tape.state.away")


def _saved(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    """A server without a model plays the saved recording, with the same texts, figures and charts."""
    texts, words = {lane: shown(page, lane) for lane in LANES}, page.evaluate(WORDS)
    export, charts = page.evaluate(EXPORT), page.evaluate(CHARTS)
    with page.expect_download() as saving:
        page.click("[data-take=page]")
    file = tmp_path / saving.value.suggested_filename
    saving.value.save_as(file)
    assert file.name == "bass-race.html"
    # The figure "new tokens" of each instant is the number of tokens written by then.
    written = {lane: 0 for lane in LANES}
    for instant in load(file)["snapshots"]:
        for lane, lane_update in (update for line in instant["lines"] for update in line.items()):
            written[lane] += sum(token[0] != "+" for tokens in lane_update["new"].values() for token in tokens)
        assert {lane: instant["view"]["lanes"][lane]["metrics"]["new_tokens"] for lane in LANES} == written
    with (
        serving(tmp_path / "log.txt", "--replay", str(file)) as (server, _),
        watched(context, server) as other,
    ):
        expect(other.locator("[data-replay]")).to_contain_text("no model is loaded")
        assert_fits(other, 1024, 1400)
        expect(other.locator("#prompt")).to_have_count(0)
        other.evaluate(KEEP_CHARTS)
        run_to_the_end(other)
        expect(other.locator(".recording-mark")).to_be_visible()
        expect(other.locator(".recording-about")).not_to_be_empty()
        other.wait_for_function(f"(words) => JSON.stringify(({WORDS})()) === JSON.stringify(words)", arg=words)
        assert {lane: shown(other, lane) for lane in LANES} == texts
        assert other.evaluate(EXPORT) == export and other.evaluate(CHARTS) == charts
        # The page that plays the recording saves the same recording again.
        no_origin = {"about": "", "made": ""}
        assert {**other.evaluate(TAPE), **no_origin} == {**page.evaluate(TAPE), **no_origin}
        other.click("[data-tape=play]")
        other.wait_for_function(f"() => ({AT})() < Bass.tape.state.count - 1")
        other.get_by_role("tab", name="Sweep").click()
        expect(other.locator(".readers-said")).to_contain_text("as fast as Regular")
        expect(other.locator("#sweep-predict")).to_be_visible()
        expect(other.locator("#sweep-measure, #sweep-prompts")).to_have_count(0)


def start_long_race(page: Page, count: int = 4) -> None:
    """Start a long race and wait until it has more than `count` instants."""
    fill(page, batch=8, tokens=1024)
    choose_option(page, "draft-length", DRAFT_LENGTH_WORDS["auto"])
    page.click("#run")
    page.wait_for_function("(count) => Bass.tape.state.count > count && !Bass.tape.state.recorded", arg=count)


def test_the_page_can_go_back_during_a_race_and_return(page: Page) -> None:
    start_long_race(page)
    show_instant(page, 1)
    state, before = page.evaluate(STATE), shown(page, "bass")
    assert state["away"] and state["now"] == 1
    # While the page shows an earlier instant, new values from the server change nothing.
    page.wait_for_timeout(1500)
    assert shown(page, "bass") == before and page.evaluate(STATE) == state
    page.click("[data-tape=live]")
    page.wait_for_function("(count) => Bass.tape.state.count > count + 3", arg=state["count"])
    texts = shown(page, "bass")
    assert all(text.startswith(part) for text, part in zip(texts, before, strict=True)) and texts != before
    # While the step-by-step view is open, the slider is disabled.
    page.click("[data-switch=stepping]")
    expect(page.locator(SLIDER)).to_be_disabled()
    page.click("[data-switch=stepping]")
    expect(page.locator(SLIDER)).to_be_enabled()
    # Stop shows the newest instant. Afterwards, earlier instants can still be shown.
    page.evaluate("() => Bass.tape.jump(2)")
    page.click("#stop")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    state = page.evaluate(STATE)
    assert state["now"] == state["count"] - 1 and state["ended"] == "stopped" and not state["away"]
    page.evaluate("() => Bass.tape.jump(0)")
    expect(page.locator("#lane-bass .state")).not_to_have_text("Stopped")
    page.evaluate("() => Bass.tape.live()")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    # A new race is shown from its start, even if the page showed an earlier instant.
    page.evaluate("() => Bass.tape.jump(0)")
    expect(page.locator("#run")).to_be_enabled()
    fill(page, tokens=6)
    page.click("#run")
    expect(page.locator("#lane-bass .state")).to_contain_text("Finished", timeout=120_000)
    assert not page.evaluate(STATE)["away"]


def test_an_idle_page_plays_a_recording_while_another_race_has_the_device(
    context: BrowserContext, server: str
) -> None:
    client = Client(server, verbose=False)
    # One race may end before the recording does.
    jobs = [client.submit("Hello", 8, 1024, 0.9, 0, api_name="/race") for _ in range(4)]
    next(iter(jobs[0]))
    with watched(context, server) as page:
        page.click("[data-recording=win]")
        expect(page.locator(".recording-mark")).to_be_visible()
        expect(page.locator(".race-note")).to_have_text("Recorded on two cores of a Xeon with AMX.")
        # The form has the settings of this recording. For another recording, the page lists the differences.
        expect(page.locator(".of-lanes")).to_have_text("")
        expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done")
        assert not all(job.done() for job in jobs)
        for lane in LANES:
            expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
        expect(page.locator(".figures-table")).to_be_visible()
        recorded = shown(page, "bass")
        page.evaluate("() => Bass.tape.jump(1)")
        assert all(text.startswith(part) for text, part in zip(recorded, shown(page, "bass"), strict=True))
        page.click("[data-recording=loss]")
        page.wait_for_function("() => Bass.tape.state.recorded.name === 'loss' && Bass.tape.state.now > 1")
        differs = "Recorded with batch size 8, temperature 1.5, draft length bass and 2 more"
        expect(page.locator(".of-lanes")).to_contain_text(differs)
        # Run ends the recording, and shows the race once the device is free.
        page.evaluate("() => (Bass.tape.speed = 0.1)")
        fill(page, tokens=6)
        page.click("#run")
        page.wait_for_function("() => !Bass.tape.state.playing")
        expect(page.locator("[data-recording=win]")).to_be_disabled()
        # Until then, nothing moves the recording: reaching its end would pass for the end of the race.
        for control in ("[data-tape=play]", "[data-tape=next]", "[data-speed='1']", SLIDER):
            expect(page.locator(control)).to_be_disabled()
        state = page.evaluate(STATE)
        page.evaluate("() => { const { play, seek, live, jump } = Bass.tape; play(); seek(0); live(); jump(0); }")
        page.evaluate("() => Bass.next()")
        assert page.evaluate(STATE) == state
        for job in jobs:
            job.cancel()
        expect(page.locator(".recording-note")).to_be_hidden()
        expect(page.locator("#lane-bass .state")).to_contain_text("Finished")
        assert page.evaluate("() => Bass.asJson()").count("Hello") >= 1
        assert page.evaluate("() => Bass.tape.speed") == 1
        # Show a recording again, then go back to the visitor's race.
        revealed(page)
        texts = {lane: shown(page, lane) for lane in LANES}
        page.click("[data-recording=win]")
        expect(page.locator("[data-back]")).to_be_visible()
        page.click("[data-back]")
        expect(page.locator(".recording-note")).to_be_hidden()
        revealed(page)
        assert {lane: shown(page, lane) for lane in LANES} == texts
        assert page.evaluate("() => Bass.tape.speed") == 1
        # There is no way back to it while the next race waits.
        page.click("[data-recording=win]")
        expect(page.locator("[data-back]")).to_be_enabled()
        pressed = "document.querySelector('#run').click(), document.querySelector('[data-back]').disabled"
        assert page.evaluate(f"() => ({pressed})")
        expect(page.locator(".recording-note")).to_be_hidden()
