"""AMUSD's lane on the page is drawn like the others, with a timeline of when its draft and target were busy."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from ..browser import LANES, fill, run_to_the_end, shown

SPANS = {
    "target": [[0, 100], [900, 1900], [1950, 2000]],
    "draft": [[1000, 1200], [1500, 1600]],
    "rollbacks": [400, 1700],
    "target_busy_ms": 1500,
    "draft_busy_ms": 500,
    "rolled_back": 2,
    "thrown_away": 7,
    "note": None,
}
DRAW = "spans => Bass.timeline(document.getElementById('lane-bass'), spans, 2000)"


def test_the_newest_part_is_drawn(page: Page) -> None:
    page.evaluate(DRAW, SPANS)
    figure = page.locator("#lane-bass .timeline")
    expect(figure.locator("rect.target")).to_have_count(2)
    expect(figure.locator("rect.draft")).to_have_count(2)
    expect(figure.locator(".rollback")).to_have_count(1)
    expect(figure.locator("figcaption")).to_have_text(
        "The newest 1.5 s. So far: target (above) busy 75 %, draft (below) 25 %; 2 roll-backs (red lines), "
        "7 drafts thrown away"
    )
    first = figure.locator("rect.target").first
    assert float(first.get_attribute("x") or "") == 1000 * (900 - 500) / 1500
    page.evaluate(DRAW, {**SPANS, "note": "The draft process hangs. This lane goes on as regular decoding."})
    expect(figure.locator("figcaption")).to_contain_text("goes on as regular decoding")
    page.evaluate(DRAW, None)
    expect(figure).to_have_count(0)


@pytest.mark.slow
def test_a_race_of_four_lanes_has_the_fourth_with_its_timeline(page: Page) -> None:
    page.click("text=More settings")
    page.get_by_role("checkbox", name="AMUSD").check()
    fill(page, batch=1, tokens=24)
    run_to_the_end(page, (*LANES, "amusd"))
    lane = page.get_by_role("region", name="AMUSD")
    expect(lane.locator(".sequence")).to_have_count(1)
    assert len(shown(page, "amusd")[0]) > 0
    expect(lane.locator("figcaption")).to_contain_text("So far: target (above) busy")
    assert lane.locator("rect.target").count() > 0
    # Four lanes that do not fit side by side stand two by two.
    tops = [page.locator(f"#lane-{name}").bounding_box() for name in (*LANES, "amusd")]
    assert [box and round(box["y"]) for box in tops].count(round(tops[0]["y"] if tops[0] else -1)) == 2
    page.get_by_role("checkbox", name="AMUSD").uncheck()
    run_to_the_end(page)
    expect(page.locator("#lane-amusd")).to_be_hidden()
