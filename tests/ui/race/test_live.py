"""While a race runs, the charts keep pause, zoom and hover box, do not wait long, and the step inspector works."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, SamplingParams, race

from ..browser import PATIENCE_MS, fill, open_page, play, run_to_the_end

pytestmark = pytest.mark.slow
# data[1] is the lane that runs longest: it decodes one sequence after another.
PLOT = "document.querySelector('[data-chart=race] .plot')"
POINTS = f"{PLOT}.data[1].x.length"
RANGE = f"{PLOT}._fullLayout.xaxis.range"
BASS = f"{PLOT}.data.find((trace) => trace.name === 'BASS')"
# Counts frames, and those in which the chart had no hover box.
COUNT_MISSING = """() => {
  const boxes = window.boxes = { frames: 0, missing: 0 };
  const frame = () => {
    boxes.frames += 1;
    boxes.missing += document.querySelector("[data-chart=race] .hoverlayer .legend") === null;
    if (window.boxes === boxes) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""

# Names of the charts in view that have lines. One that comes into view later is drawn from the held data.
IN_SIGHT = """() => [...document.querySelectorAll("[data-chart]")].filter((figure) => {
  const { top, bottom } = figure.getBoundingClientRect();
  return figure.querySelector(".plot").data?.length && top < innerHeight && bottom > 0;
}).map((figure) => figure.dataset.chart)"""
# What the named charts show: [lane, number of points, last x] for each line.
DRAWN = """(names) => names.map((name) => document.querySelector(`[data-chart=${name}] .plot`).data.map(
  ({ name, x }) => [name, x.length, x.at(-1)]))"""
# Counts the updates for the charts, and keeps the newest one's lane time in seconds.
COUNT_NEWS = """() => {
  const news = window.news = { count: 0, end: 0 };
  Bass.on("charts", ({ lanes }) => {
    news.count += 1;
    news.end = lanes.speculative.clock_ms.at(-1) * 1e-3;  // as the charts have it
  });
}"""
WRITTEN = "document.querySelectorAll('.sequence .token').length"
COLOUR = f"{PLOT}.layout.font.color"
DRAWN_END = f"{PLOT}.data.find((trace) => trace.name === 'Speculative').x.at(-1)"
# True once every visible figure has been drawn and the page is idle.
AT_REST = """() => [...document.querySelectorAll("[data-chart] .plot, .bass-summary .plot")].every((plot) => {
  const { top, bottom } = plot.getBoundingClientRect();
  return plot.data?.length || plot.emptyAs?.startsWith("n/a") || bottom < 0 || top > innerHeight;
}) && new Promise((resolve) => requestIdleCallback(() => resolve(true)))"""
# Records the pause in ms before each drawing of a chart, whether the race was over, and whether the race chart
# had no lines yet.
WATCH_PAUSES = """(() => {
  const pauses = window.pauses = [], later = window.setTimeout;
  window.setTimeout = (callback, ms, ...rest) => {
    if (!String(callback).includes("this.paint(")) return later(callback, ms, ...rest);
    const over = document.querySelector("#status-line .message").dataset.phase === "done";
    const empty = !document.querySelector("[data-chart=race] .plot").data?.length;
    return later(() => { pauses.push({ ms, over, empty }); callback(); }, ms, ...rest);
  };
})()"""


@pytest.fixture(scope="module")
def shots(pair: ModelPair) -> list[Any]:
    """A race that is played in about a minute, however fast or busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[race.__module__], "SNAPSHOT_SECONDS", 0)
        shots: list[Any] = list(
            race(pair, "Hello", n=2, sampling=SamplingParams(0.9), seed=3, max_new_tokens=150, draft_length=1)
        )
    shots = [*shots[: -1 : len(shots) // 90 + 1], shots[-1]]
    for i, shot in enumerate(shots):
        shot["elapsed_ms"] = 1000.0 * i
    return shots


@pytest.fixture
def running(page: Page, shots: list[Any]) -> Page:
    """A page with a long race under way whose chart is in view and drawn."""
    begin(page, shots)
    page.wait_for_function(f"() => {PLOT}.data?.length > 1 && {POINTS} > 2", timeout=PATIENCE_MS)
    return page


def begin(page: Page, shots: list[Any]) -> None:
    """Play the race, and wait for its first tokens: after them the lanes push nothing down any more."""
    play(page, shots, to_the_end=False)
    page.locator(".sequence .token").first.wait_for(timeout=PATIENCE_MS)
    page.locator("[data-chart=race]").scroll_into_view_if_needed()


def more(page: Page, count: int = 3) -> None:
    """Wait until the chart has grown `count` times. Its last x is compared, since long lines lose points."""
    for _ in range(count):
        page.wait_for_function(f"end => {DRAWN_END} > end", arg=page.evaluate(DRAWN_END), timeout=PATIENCE_MS)


def box(page: Page) -> dict[str, float]:
    """The bounding box of the chart's plot area."""
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    found = page.locator("[data-chart=race] .nsewdrag").bounding_box()
    assert found
    return dict(found)


def test_zoom_and_hover_box_stay_through_updates(running: Page) -> None:
    page = running
    said = page.locator("[data-chart=race] .hoverlayer .legend")
    page.wait_for_function(f"() => {BASS}?.x.length > 8", timeout=PATIENCE_MS)
    place, seen = box(page), page.evaluate(f"{BASS}.x[4]")
    middle = place["y"] + place["height"] / 2
    # A hover box appears only within a few pixels of a point, and early points lie far apart.
    across = f"x => {PLOT}._fullLayout.xaxis.d2p(x)"
    there = place["x"] + page.evaluate(across, seen)
    page.mouse.move(max(there - 0.2 * place["width"], place["x"] + 1), middle)
    page.mouse.down()
    page.mouse.move(min(there + 0.2 * place["width"], place["x"] + place["width"] - 1), middle)
    page.mouse.up()
    page.wait_for_function(f"() => {PLOT}._fullLayout.xaxis.autorange === false")
    zoomed = page.evaluate(RANGE)
    page.mouse.move(place["x"] + page.evaluate(across, seen), middle)
    expect(said).to_contain_text("BASS")
    # From here the pointer rests on the plot.
    page.evaluate(COUNT_MISSING)
    more(page)
    assert page.evaluate("window.boxes.frames") > 0 and page.evaluate("window.boxes.missing") == 0
    assert page.evaluate(RANGE) == zoomed
    page.wait_for_function(f"end => Math.max(...{PLOT}.data[1].x) > end", arg=zoomed[1], timeout=PATIENCE_MS)


def test_paused_charts_stand_still_while_the_lanes_grow_on(page: Page, shots: list[Any]) -> None:
    page.evaluate(COUNT_NEWS)
    begin(page, shots)
    # Scroll before the wait, so that the click does not scroll the page.
    page.locator("#pause-charts").scroll_into_view_if_needed()
    page.wait_for_function(f"() => {PLOT}.data?.length > 1 && {POINTS} > 2", timeout=PATIENCE_MS)
    page.click("#pause-charts")
    charts, known, light = page.evaluate(IN_SIGHT), page.evaluate("window.news.end"), page.evaluate(COLOUR)
    assert "race" in charts
    held = page.evaluate(DRAWN, charts)
    for _ in range(3):
        count, written = page.evaluate("window.news.count"), page.evaluate(WRITTEN)
        page.wait_for_function(
            f"([count, written]) => window.news.count >= count + 2 && {WRITTEN} > written",
            arg=[count, written],
            timeout=PATIENCE_MS,
        )
        assert page.evaluate(DRAWN, charts) == held
        expect(page.locator("#pause-charts")).to_have_text("Resume charts")
    # A change of theme redraws the held data.
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_function(f"colour => {COLOUR} !== colour", arg=light, timeout=PATIENCE_MS)
    assert page.evaluate(DRAWN_END) <= known < page.evaluate("window.news.end")
    newest = page.evaluate("window.news.end")
    page.get_by_role("button", name="Resume charts").click()
    page.wait_for_function(f"newest => {DRAWN_END} >= newest", arg=newest, timeout=PATIENCE_MS)
    more(page)
    # A new run ends the pause.
    page.get_by_role("button", name="Pause charts").click()
    page.click("#stop")
    page.click("#run")
    expect(page.locator("#pause-charts")).to_have_text("Pause charts", timeout=PATIENCE_MS)


def test_the_inspector_follows_and_steps_back_during_the_run(running: Page) -> None:
    page = running
    at, line = page.locator("[data-pick=round]"), page.locator(".round-line")
    # The inspector is drawn only while in view.
    at.scroll_into_view_if_needed()
    page.select_option("[data-pick=lane]", "bass")
    expect(page.locator("[data-pick=follow]")).to_be_checked()
    expect(at).not_to_have_value("")
    newest = int(at.input_value())
    page.wait_for_function("was => Number(document.querySelector('[data-pick=round]').value) > was", arg=newest)
    page.click("[data-step='-1']")
    expect(page.locator("[data-pick=follow]")).not_to_be_checked()
    held, words, count = at.input_value(), line.text_content(), page.inner_text("[data-rounds]")
    cells = page.locator(".round [data-row=token] td").all_text_contents()
    expect(page.locator("[data-rounds]")).not_to_have_text(count, timeout=PATIENCE_MS)
    assert (at.input_value(), line.text_content()) == (held, words)
    assert page.locator(".round [data-row=token] td").all_text_contents() == cells
    page.click("[data-step='1']")
    expect(at).to_have_value(str(int(held) + 1))
    page.check("[data-pick=follow]")
    page.wait_for_function(
        "was => Number(document.querySelector('[data-pick=round]').value) > was", arg=int(held) + 1
    )


def test_the_charts_of_a_first_race_do_not_wait_for_each_other(page: Page, server: str) -> None:
    page.add_init_script(WATCH_PAUSES)
    open_page(page, server)
    fill(page, batch=4, tokens=100, seed=20)
    # The Run button stays in view.
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    run_to_the_end(page)
    page.wait_for_function(AT_REST)
    pauses = page.evaluate("pauses")
    assert max(pause["ms"] for pause in pauses if pause["empty"]) <= 300
    assert all(pause["ms"] == 0 for pause in pauses if pause["over"])
