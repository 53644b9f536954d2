"""A run can be seen again at any instant, saved, exported and played: the same texts, rounds and figures.

Contract: one race on the page serves the module; each test leaves it at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from ui.recordings.check import fault
from ui.recordings.load import load_recording

from ..browser import LANES, fill, run_to_the_end, shown
from ..conftest import started, watched

pytestmark = pytest.mark.slow
SLIDER = ".scrubber input"
# The run as the page holds it; what its charts were told last, without the run's name.
EXPORT = "() => JSON.parse(Bass.asJson())"
KEEP_CHARTS = "() => Bass.on('charts', (charts) => (window.told = charts))"
CHARTS = "() => { const { run, ...rest } = window.told; return rest; }"
TAPE = "() => JSON.parse(Bass.tape.asRecording({ about: 'a test', made: {} }))"
AT = "() => Bass.tape.state.now"
# What the lanes say, and the summary.
PARTS = ".lane .numbers, .lane .state, .verdict, .figures-table"
SAID = f"() => [...document.querySelectorAll('{PARTS}')].map((e) => e.innerText)"


@pytest.fixture(scope="module")
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """The page after a race of two sampled rows."""
    with watched(context, server) as page:
        page.evaluate(KEEP_CHARTS)
        # Long enough for many snapshots on a fast machine.
        fill(page, tokens=800)
        run_to_the_end(page)
        page.wait_for_function("() => Bass.tape.state.count > 5")
        yield page


def instant(page: Page, i: int) -> None:
    """Show instant `i`, and wait until it is drawn."""
    page.evaluate("(i) => Bass.tape.jump(i)", i)
    page.wait_for_function("() => new Promise((done) => Bass.soon(() => done(true)))")


def test_each_instant_has_the_figures_of_what_was_written_by_then(page: Page) -> None:
    document = page.evaluate(TAPE)
    assert fault(document) is None
    written = {lane: 0 for lane in LANES}
    lines = iter(document["lines"])
    at = 0
    for one in document["shown"]:
        while at < one["lines"]:
            for lane, news in next(lines).items():
                written[lane] += sum(token[0] != "+" for tokens in news["new"].values() for token in tokens)
            at += 1
        assert {lane: one["view"]["lanes"][lane]["metrics"]["new_tokens"] for lane in LANES} == written
    assert at == len(document["lines"])


def test_back_shows_a_part_and_forth_the_whole(page: Page) -> None:
    texts, said, export = {lane: shown(page, lane) for lane in LANES}, page.evaluate(SAID), page.evaluate(EXPORT)
    charts, count = page.evaluate(CHARTS), page.evaluate("() => Bass.tape.state.count")
    page.select_option("[data-pick=lane]", "speculative")
    page.select_option("[data-pick=sequence]", index=1)
    expect(page.locator("[data-tape=live]")).to_be_disabled()
    lengths = []
    for i in (0, count // 2, 1, count - 2):
        instant(page, i)
        assert page.evaluate(AT) == i
        earlier = page.evaluate(EXPORT)
        for lane in LANES:
            now = shown(page, lane)
            assert all(whole.startswith(part) for whole, part in zip(texts[lane], now, strict=True))
            assert now == [one["text"] for one in earlier["lanes"][lane]["sequences"]]
            assert page.inner_text(f"#lane-{lane} [data-figure=new_tokens]") == str(
                sum(len(one["token_ids"]) for one in earlier["lanes"][lane]["sequences"])
            )
            # No later round, and no later point of a chart.
            clock = earlier["lanes"][lane]["clock_ms"]
            rounds = [one["ms"] for one in earlier["lanes"][lane]["rounds"]]
            assert rounds == [one["ms"] for one in export["lanes"][lane]["rounds"]][: len(rounds)]
            points = page.evaluate(CHARTS)["lanes"][lane]["clock_ms"]
            assert points == charts["lanes"][lane]["clock_ms"][: len(points)] and max(points) <= clock + 1e-3
        lengths.append(len(rounds))
        expect(page.locator(".bass-summary")).to_be_hidden()
    assert lengths[0] < lengths[1] < lengths[3]
    # What a reader chose stays.
    assert (
        page.input_value("[data-pick=lane]") == "speculative" and page.input_value("[data-pick=sequence]") == "1"
    )
    page.click("[data-tape=live]")
    assert {lane: shown(page, lane) for lane in LANES} == texts
    expect(page.locator(".bass-summary")).to_be_visible()
    page.wait_for_function(f"(said) => JSON.stringify(({SAID})()) === JSON.stringify(said)", arg=said)
    assert page.evaluate(EXPORT) == export and page.evaluate(CHARTS) == charts


def test_the_slider_goes_by_pointer_keys_and_play(page: Page) -> None:
    slider, last = page.locator(SLIDER), page.evaluate(AT)
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"(i) => ({AT})() === i", arg=last - 1)
    expect(page.locator(".tape-time")).to_contain_text(" of ")
    page.keyboard.press("Home")
    page.wait_for_function(f"() => ({AT})() === 0")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => ({AT})() === 1")
    box = slider.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function(f"() => ({AT})() > 1")
    middle = page.evaluate(
        "() => Bass.tape.elapsed(Bass.tape.state.now) / Bass.tape.elapsed(Bass.tape.state.count - 1)"
    )
    assert 0.1 < middle < 0.9
    page.click("[data-tape=play]")
    page.wait_for_function(f"(i) => ({AT})() === i", arg=last)
    expect(page.locator("[data-tape=play]")).to_have_attribute("aria-label", "Play from the start")
    assert not page.evaluate("() => Bass.tape.state.away")


def test_a_saved_recording_plays_everything_without_a_model(
    page: Page, context: BrowserContext, tmp_path: Path
) -> None:
    texts, said = {lane: shown(page, lane) for lane in LANES}, page.evaluate(SAID)
    export, charts = page.evaluate(EXPORT), page.evaluate(CHARTS)
    with page.expect_download() as saving:
        page.click("[data-take=recording]")
    file = tmp_path / saving.value.suggested_filename
    saving.value.save_as(file)
    assert file.name == "bass-race.json.gz"
    expect(page.locator(".took")).to_contain_text("--replay bass-race.json.gz")
    with started(tmp_path / "log.txt", "--replay", str(file)) as server, watched(context, server) as other:
        other.evaluate(KEEP_CHARTS)
        run_to_the_end(other)
        assert {lane: shown(other, lane) for lane in LANES} == texts
        other.wait_for_function(f"(said) => JSON.stringify(({SAID})()) === JSON.stringify(said)", arg=said)
        assert other.evaluate(EXPORT) == export and other.evaluate(CHARTS) == charts
        # Saved again it is the same race.
        assert {**other.evaluate(TAPE), "about": "", "made": ""} == {
            **page.evaluate(TAPE),
            "about": "",
            "made": "",
        }
        other.click("[data-tape=play]")
        other.wait_for_function(f"() => ({AT})() < Bass.tape.state.count - 1")


def test_an_exported_run_plays_as_far_as_it_tells(page: Page, tmp_path: Path) -> None:
    export = page.evaluate(EXPORT)
    (tmp_path / "bass-run.json").write_text(json.dumps(export))
    document = load_recording(tmp_path / "bass-run.json").document
    texts = {lane: shown(page, lane) for lane in LANES}
    page.evaluate("(document) => { Bass.tape.load(document, { name: 'export' }); Bass.tape.live(); }", document)
    assert {lane: shown(page, lane) for lane in LANES} == texts
    played = page.evaluate(EXPORT)
    assert played == export
    half: dict[str, Any] = document["shown"][len(document["shown"]) // 2]["view"]["lanes"]
    for figures in half.values():
        assert figures["metrics"]["new_tokens"] > 0 and figures["metrics"]["ms_per_token"] > 0
    page.click("[data-back]")
    expect(page.locator(".recording-note")).to_be_hidden()
    assert page.evaluate(EXPORT) == export
