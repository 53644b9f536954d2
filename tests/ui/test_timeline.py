"""AMUSD's lane on the page: drawn like the others, with when its draft and target were busy."""

from __future__ import annotations

from playwright.sync_api import Page, expect

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
        "Target (above) busy 75 %, draft (below) 25 %; 2 roll-backs, 7 drafts thrown away"
    )
    first = figure.locator("rect.target").first
    assert float(first.get_attribute("x") or "") == 1000 * (900 - 500) / 1500
    page.evaluate(DRAW, {**SPANS, "note": "The draft process hangs. This lane goes on as regular decoding."})
    expect(figure.locator("figcaption")).to_contain_text("goes on as regular decoding")
    page.evaluate(DRAW, None)
    expect(figure).to_have_count(0)
