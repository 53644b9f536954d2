"""During a race: charts keep their pause, zoom and hover box, and the inspector and the stepper work."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, SamplingParams, race

from .browser import PATIENCE_MS, fill, loaded, play, shown

pytestmark = pytest.mark.slow
# data[1] is the lane that runs longest: it decodes one sequence after another.
PLOT = "document.querySelector('[data-chart=race] .plot')"
POINTS = f"{PLOT}.data[1].x.length"
RANGE = f"{PLOT}._fullLayout.xaxis.range"
BASS = f"{PLOT}.data.find((trace) => trace.name === 'BASS')"
# Counts all frames (`frames`), and the frames in which the chart had no hover box (`missing`).
COUNT_MISSING = """() => {
  const boxes = window.boxes = { frames: 0, missing: 0 };
  const frame = () => {
    boxes.frames += 1;
    boxes.missing += document.querySelector("[data-chart=race] .hoverlayer .legend") === null;
    if (window.boxes === boxes) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""

# Names of the charts in view that have lines. A chart that comes into view later is drawn from the paused data.
IN_SIGHT = """() => [...document.querySelectorAll("[data-chart]")].filter((figure) => {
  const { top, bottom } = figure.getBoundingClientRect();
  return figure.querySelector(".plot").data?.length && top < innerHeight && bottom > 0;
}).map((figure) => figure.dataset.chart)"""
# For each line of the named charts: [lane, number of points, last x].
DRAWN = """(names) => names.map((name) => document.querySelector(`[data-chart=${name}] .plot`).data.map(
  ({ name, x }) => [name, x.length, x.at(-1)]))"""
# Counts the updates of the charts, and keeps the lane time of the newest update in seconds.
COUNT_UPDATES = """() => {
  const updates = window.updates = { count: 0, end: 0 };
  Bass.on("charts", ({ lanes }) => {
    updates.count += 1;
    updates.end = lanes.speculative.clock_ms.at(-1) * 1e-3;  // as the charts have it
  });
}"""
WRITTEN = "document.querySelectorAll('.sequence .token').length"
COLOUR = f"{PLOT}.layout.font.color"
DRAWN_END = f"{PLOT}.data.find((trace) => trace.name === 'Speculative').x.at(-1)"


# Plays the race that is on the tape in about two minutes.
SLOWLY = "() => (Bass.tape.speed = Bass.tape.state.end / 120_000)"


def long_race(pair: ModelPair) -> list[Any]:
    """A race of about 130 snapshots on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[race.__module__], "SNAPSHOT_SECONDS", 0)
        snapshots: list[Any] = list(
            race(pair, "Hello", n=2, sampling=SamplingParams(0.9), seed=3, max_new_tokens=450, draft_length=1)
        )
    return [*snapshots[: -1 : len(snapshots) // 130 + 1], snapshots[-1]]


def wait_for_growth(page: Page, count: int = 3) -> None:
    """Wait until the chart has grown `count` times: compare its last x, since long lines lose points."""
    for _ in range(count):
        page.wait_for_function(f"end => {DRAWN_END} > end", arg=page.evaluate(DRAWN_END), timeout=PATIENCE_MS)


def plot_area(page: Page) -> dict[str, float]:
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    bounds = page.locator("[data-chart=race] .nsewdrag").bounding_box()
    assert bounds
    return dict(bounds)


def test_inspector_pause_and_zoom_work_during_a_race(page: Page, pair: ModelPair) -> None:
    loaded(page)
    page.evaluate(COUNT_UPDATES)
    page.evaluate("() => (Bass.tape.speed = 1e-6)")
    play(page, long_race(pair), to_the_end=False)
    page.evaluate(SLOWLY)
    # Wait for the first tokens: before them, growing lanes still move the parts below.
    page.locator(".sequence .token").first.wait_for(timeout=PATIENCE_MS)
    _inspector(page)
    # Scroll before the wait, so that no click scrolls the page.
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    page.locator("#pause-charts").scroll_into_view_if_needed()
    page.wait_for_function(f"() => {PLOT}.data?.length > 1 && {POINTS} > 2", timeout=PATIENCE_MS)
    _pause(page)
    _zoom(page)
    # A new run ends a pause.
    page.get_by_role("button", name="Pause charts").click()
    page.click("#stop")
    page.click("#run")
    expect(page.locator("#pause-charts")).to_have_text("Pause charts", timeout=PATIENCE_MS)


def _inspector(page: Page) -> None:
    """The inspector follows the newest round until the reader steps back."""
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
    shown_round, words, count = at.input_value(), line.text_content(), page.inner_text("[data-rounds]")
    cells = page.locator(".round-scroll td").all_text_contents()
    expect(page.locator("[data-rounds]")).not_to_have_text(count, timeout=PATIENCE_MS)
    assert (at.input_value(), line.text_content()) == (shown_round, words)
    assert page.locator(".round-scroll td").all_text_contents() == cells
    page.click("[data-step='1']")
    expect(at).to_have_value(str(int(shown_round) + 1))
    page.check("[data-pick=follow]")
    page.wait_for_function(
        "was => Number(document.querySelector('[data-pick=round]').value) > was", arg=int(shown_round) + 1
    )


def _pause(page: Page) -> None:
    """Paused charts stay as they are while the lanes grow."""
    page.click("#pause-charts")
    charts, known, light = page.evaluate(IN_SIGHT), page.evaluate("window.updates.end"), page.evaluate(COLOUR)
    assert "race" in charts
    drawn = page.evaluate(DRAWN, charts)
    for _ in range(3):
        count, written = page.evaluate("window.updates.count"), page.evaluate(WRITTEN)
        page.wait_for_function(
            f"([count, written]) => window.updates.count >= count + 2 && {WRITTEN} > written",
            arg=[count, written],
            timeout=PATIENCE_MS,
        )
        assert page.evaluate(DRAWN, charts) == drawn
        expect(page.locator("#pause-charts")).to_have_text("Resume charts")
    # A change of theme redraws the paused data.
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_function(f"colour => {COLOUR} !== colour", arg=light, timeout=PATIENCE_MS)
    page.wait_for_function("known => window.updates.end > known", arg=known, timeout=PATIENCE_MS)
    assert page.evaluate(DRAWN_END) <= known
    newest = page.evaluate("window.updates.end")
    page.get_by_role("button", name="Resume charts").click()
    page.wait_for_function(f"newest => {DRAWN_END} >= newest", arg=newest, timeout=PATIENCE_MS)
    wait_for_growth(page)


def _zoom(page: Page) -> None:
    """Updates of the chart keep the reader's zoom and the hover box."""
    hover_box = page.locator("[data-chart=race] .hoverlayer .legend")
    page.wait_for_function(f"() => {BASS}?.x.length > 8", timeout=PATIENCE_MS)
    place, seen = plot_area(page), page.evaluate(f"{BASS}.x[4]")
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
    expect(hover_box).to_contain_text("BASS")
    # From here on the pointer stays on the plot.
    page.evaluate(COUNT_MISSING)
    wait_for_growth(page)
    assert page.evaluate("window.boxes.frames") > 0 and page.evaluate("window.boxes.missing") == 0
    assert page.evaluate(RANGE) == zoomed
    page.wait_for_function(f"end => Math.max(...{PLOT}.data[1].x) > end", arg=zoomed[1], timeout=PATIENCE_MS)


def test_a_held_page_shows_nothing_new_until_it_is_released(page: Page) -> None:
    fill(page, batch=1, tokens=60)
    # Hold the page from the start, so that the test does not depend on the speed of the race.
    page.evaluate("() => { document.querySelector('#run').click(); Bass.hold(true); }")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#run")).to_be_enabled(timeout=120_000)
    assert shown(page, "bass") == []
    page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:pause'))")
    line = page.locator(".step-part .step-line")
    expect(line).to_contain_text("No round yet")
    for _ in range(4):
        page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:step'))")
    expect(line).to_contain_text("so far")
    done_while_held = page.evaluate("() => Bass.run().done")
    page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:pause'))")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done")
    assert done_while_held is False
    assert sum(map(len, shown(page, "bass"))) > 0


def test_printing_during_a_race_draws_charts_out_of_view(page: Page) -> None:
    loaded(page)
    page.set_viewport_size({"width": 1400, "height": 300})
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function("() => document.querySelector('#lane-bass .sequence')?.textContent.length > 20")
    run = "JSON.parse(JSON.stringify(Bass.run().head.run))"
    drawn = f"{PLOT}.layout?.uirevision === {run}"
    assert page.evaluate(drawn) is False
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(drawn) is True
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.click("#stop")
    expect(page.locator("#run")).to_be_enabled()
