"""The slider over readers next to the lanes, and its curve below them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import CostTable
from ui.race import how
from ui.sweep import readers
from ui.sweep.readers import figures, template

from .browser import assert_accessible, assert_fits
from .conftest import watched

# The steps on the time axis, in percent of its length, and the height of the first one.
BARS = """() => Object.fromEntries([...document.querySelectorAll(".axis-lane")].map((lane) =>
  [lane.dataset.axis, { first: lane.bars[0].end - lane.bars[0].begin, count: lane.bars.length,
    height: lane.bars[0].height }]))"""


def speed(machine: str, text: str, readers: int) -> float:
    known = figures()
    at, steps = known["readers"].index(readers), known["machines"][machine]
    tokens, ms = steps["bass"][text][at]
    return float(tokens / ms / (readers / steps["regular"][at]))


def test_the_html_names_the_machine_the_date_and_the_revision_of_each_figure() -> None:
    html = template()
    for machine in ("amx", "no-amx"):
        source = figures()["machines"][machine]["source"]
        assert "revision" in source and "2026" in source and source in html


def costs() -> CostTable:
    """A machine on which a step of one token takes 10 ms, and each further token 2 ms more."""
    return CostTable({rows: [(1.0, 10.0), (101.0, 210.0)] for rows in (1, 8)}, {1: 0.5, 8: 0.5}, False)


def test_this_machine_comes_first_with_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: Any = SimpleNamespace(name="smollm2")
    monkeypatch.setattr(readers, "stored_costs", lambda pair: costs())
    own = readers.here(pair)
    assert own is not None
    # Multiplying 5 tokens takes as long as a step of one token.
    assert own["balance"] == 5 and "drafting can pay up to about 5 tokens per" in how.template(5)
    assert own["regular"][:4] == [10, 12, 14, 16]
    tokens, ms = own["bass"]["repeat"][0]
    # Nearly all of the 3 drafts are accepted: a step of 4 tokens takes 16 ms, and 3 drafts 0.5 ms each.
    assert 3.5 < tokens < 4 and 17 <= ms <= 17.5
    html = template(own)
    assert html.index("This machine") < html.index("A CPU with AMX")
    monkeypatch.setattr(readers, "stored_costs", lambda pair: None)
    assert readers.here(pair) is None and "This machine" not in template()
    assert "per step here" not in how.template()


@pytest.mark.slow
def test_the_slider_answers_at_once_and_names_where_bass_stops_paying(opened: Page) -> None:
    requests: list[str] = []
    said, slider = opened.locator(".readers-said"), opened.get_by_role("slider", name="Readers at once")
    expect(said).to_contain_text(f"4 readers: BASS is {speed('amx', 'questions', 4):.2f}× as fast as Regular.")
    expect(opened.locator(".readers-curve polyline")).to_have_count(2)
    expect(opened.locator(".readers-curve .measured")).to_have_count(4)
    # It stands at the race's own number of readers, whose bars are measured.
    words, bars = opened.locator(".axis-words"), opened.locator(".axis")
    own = opened.evaluate(BARS)
    slider.focus()
    opened.keyboard.press("ArrowRight")
    # The recording repeats a text, so the text with that acceptance is chosen.
    expect(opened.get_by_role("radio", name="A repeated text")).to_be_checked()
    expect(words).to_have_text("Predicted: 40 tokens for each reader")
    times = f"{speed('amx', 'repeat', 5):.2f} times as fast as Regular on a CPU with AMX."
    expect(opened.locator(".said")).to_contain_text(f"With 5 readers, BASS would be {times}")
    # A bar is as wide as its step and as high as its tokens.
    known = figures()["machines"]["amx"]
    at = figures()["readers"].index(5)
    (tokens, ms), (one, one_ms) = known["bass"]["repeat"][at], known["bass"]["repeat"][0]
    opened.wait_for_function("() => document.querySelector('.axis-lane').bars.length === 40")
    drawn = opened.evaluate(BARS)
    assert drawn["bass"]["height"] / drawn["regular"]["height"] == pytest.approx(tokens / 5, rel=0.1)
    assert drawn["bass"]["first"] == pytest.approx(ms) and drawn["speculative"]["first"] == pytest.approx(one_ms)
    assert [lane["count"] for lane in drawn.values()] == [40, -(-200 // one), -(-200 // tokens)]
    ends = opened.evaluate("document.querySelector('.axis').flags")
    assert ends["regular"] / ends["bass"] == pytest.approx(speed("amx", "repeat", 5))
    opened.wait_for_function("() => document.querySelectorAll('.axis-flag:not([hidden])').length === 3")
    # Back at its own number, or at a touch of the race, the axis shows the race.
    opened.keyboard.press("ArrowLeft")
    expect(bars).not_to_have_class(re.compile("predicting"))
    opened.wait_for_function(f"(own) => JSON.stringify(({BARS})()) === JSON.stringify(own)", arg=own)
    opened.keyboard.press("ArrowLeft")
    expect(bars).to_have_class(re.compile("predicting"))
    opened.click("[data-tape=back]")
    expect(bars).not_to_have_class(re.compile("predicting"))
    expect(slider).to_have_value("4")
    opened.wait_for_function(f"(own) => JSON.stringify(({BARS})()) === JSON.stringify(own)", arg=own)
    # The curve takes the pointer, as the slider does.
    picture = opened.locator(".readers-curve svg")
    box = picture.bounding_box()
    assert box
    picture.click(position={"x": box["width"] * 0.97, "y": box["height"] / 2})
    expect(opened.locator(".readers-said")).to_contain_text("16 readers")
    opened.get_by_role("radio", name="Questions", exact=True).check(force=True)
    opened.on("request", lambda request: requests.append(request.url))
    slider.focus()
    opened.keyboard.press("End")
    expect(said).to_contain_text(f"16 readers: BASS is {speed('amx', 'questions', 16):.2f}×")
    expect(slider).to_have_attribute("aria-valuetext", "16 readers")
    opened.get_by_role("radio", name="A CPU without AMX").check(force=True)
    slider.focus()
    opened.keyboard.press("Home")
    expect(said).to_contain_text(f"1 reader: BASS is {speed('no-amx', 'questions', 1):.2f}×")
    last = max(n for n in figures()["readers"] if speed("no-amx", "questions", n) >= 1.05)
    expect(said).to_contain_text(f"BASS stops paying after {last}.")
    opened.get_by_role("radio", name="A repeated text").check(force=True)
    expect(said).to_contain_text(f"{speed('no-amx', 'repeat', 1):.2f}×")
    opened.get_by_role("radio", name="An H100").check(force=True)
    expect(said).to_contain_text("BASS still pays at 16.")
    expect(opened.locator(".readers-source")).to_contain_text("7.8B with 310M")
    assert requests == []
    assert_fits(opened, 390, 1400)
    assert_accessible(opened)


@pytest.mark.slow
def test_the_slider_names_the_readers_of_the_race_in_the_lanes(opened: Page) -> None:
    slider, words = opened.get_by_role("slider", name="Readers at once"), opened.locator(".axis-readers output")
    # While a race runs, nothing could show another number.
    opened.evaluate("() => Bass.tell('phase', 'running')")
    expect(slider).to_be_disabled()
    opened.locator(".readers-curve svg").dispatch_event("pointerdown", {"clientX": 1e6, "pointerId": 1})
    opened.evaluate("() => Bass.tell('phase', 'done')")
    expect(slider).to_be_enabled()
    expect(slider).to_have_value("4")
    # More readers than the slider has.
    opened.evaluate("() => Bass.tell('start', { ...Bass.run().head, batch_size: 20 })")
    expect(words).to_have_text("20")
    expect(slider).to_have_attribute("aria-valuetext", "20 readers")


@pytest.mark.slow
def test_without_a_race_the_slider_stays_where_it_is(context: BrowserContext, shelf: str) -> None:
    with watched(context, shelf) as page:
        slider = page.get_by_role("slider", name="Readers at once")
        expect(slider).to_have_value("1")
        page.click("[data-switch=stepping]")
        expect(page.locator(".step-part")).to_be_visible()
        expect(slider).to_have_value("1")
