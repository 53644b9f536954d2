"""AMUSD's lane on the page is drawn like the others, with a timeline of when its draft and target were busy."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from ..browser import LANES, fill, run_to_the_end, shown


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
    drawn = lane.locator(".strip").evaluate("figure => figure.blocks.map(block => block.row)")
    assert set(drawn) == {"target", "draft"}
    # Four lanes that do not fit side by side stand two by two.
    tops = [page.locator(f"#lane-{name}").bounding_box() for name in (*LANES, "amusd")]
    assert [box and round(box["y"]) for box in tops].count(round(tops[0]["y"] if tops[0] else -1)) == 2
    page.get_by_role("checkbox", name="AMUSD").uncheck()
    run_to_the_end(page)
    expect(page.locator("#lane-amusd")).to_be_hidden()
