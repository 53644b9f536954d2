"""While a race runs: zoom and hover of the charts hold through updates, and the step inspector works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .conftest import watched

pytestmark = pytest.mark.slow
# A link's settings; drafts of one token, so that no lane is through soon.
SETTINGS = "#race?prompt=Hello&batch_size=6&max_new_tokens=1024&temperature=0.9&seed=3&draft_length=1"
# The lane that runs longest is the second: one sequence after another.
PLOT = "document.querySelector('[data-chart=race] .plot')"
POINTS = f"{PLOT}.data[1].x.length"
RANGE = f"{PLOT}._fullLayout.xaxis.range"
BASS = f"{PLOT}.data.find((trace) => trace.name === 'BASS')"
# Frames in which the chart had no hover box.
COUNT_MISSING = """() => {
  const boxes = window.boxes = { frames: 0, missing: 0 };
  const frame = () => {
    boxes.frames += 1;
    boxes.missing += document.querySelector("[data-chart=race] .hoverlayer .legend") === null;
    if (window.boxes === boxes) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


@pytest.fixture
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """A long race under way, its chart in sight and drawn; closing the page ends it."""
    with watched(context, server + SETTINGS) as page:
        expect(page.locator("#max-new-tokens input")).to_have_value("1024")
        page.click("#run")
        page.locator("[data-chart=race]").scroll_into_view_if_needed()
        page.wait_for_function(f"() => {PLOT}.data?.length > 1 && {POINTS} > 2", timeout=60_000)
        yield page


def more(page: Page, count: int = 3) -> None:
    """Wait until the chart is drawn with `count` further points at least."""
    before = page.evaluate(POINTS)
    page.wait_for_function(f"least => {POINTS} >= least", arg=before + count, timeout=60_000)


def box(page: Page) -> dict[str, float]:
    """Where the chart's lines are drawn."""
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    found = page.locator("[data-chart=race] .nsewdrag").bounding_box()
    assert found
    return dict(found)


def test_zoom_and_hover_box_stay_through_updates(page: Page) -> None:
    said = page.locator("[data-chart=race] .hoverlayer .legend")
    page.wait_for_function(f"() => {BASS}?.x.length > 8", timeout=60_000)
    place, seen = box(page), page.evaluate(f"{BASS}.x[4]")
    middle = place["y"] + place["height"] / 2
    # A box appears only within a few pixels of a point, and early points lie far apart.
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
    page.wait_for_function(f"end => Math.max(...{PLOT}.data[1].x) > end", arg=zoomed[1], timeout=60_000)


def test_the_inspector_follows_and_steps_back_during_the_run(page: Page) -> None:
    at, line = page.locator("[data-pick=round]"), page.locator(".round-line")
    page.select_option("[data-pick=lane]", "bass")
    expect(page.locator("[data-pick=follow]")).to_be_checked()
    newest = int(at.input_value())
    page.wait_for_function("was => Number(document.querySelector('[data-pick=round]').value) > was", arg=newest)
    page.click("[data-step='-1']")
    expect(page.locator("[data-pick=follow]")).not_to_be_checked()
    held, words, count = at.input_value(), line.text_content(), page.inner_text("[data-rounds]")
    cells = page.locator(".round [data-row=token] td").all_text_contents()
    expect(page.locator("[data-rounds]")).not_to_have_text(count)
    assert (at.input_value(), line.text_content()) == (held, words)
    assert page.locator(".round [data-row=token] td").all_text_contents() == cells
    page.click("[data-step='1']")
    expect(at).to_have_value(str(int(held) + 1))
    page.check("[data-pick=follow]")
    page.wait_for_function(
        "was => Number(document.querySelector('[data-pick=round]').value) > was", arg=int(held) + 1
    )
