"""The tab "Sweep" in a browser: points come one by one, Stop works, and what is predicted wears its badge."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from ..browser import fill
from ..conftest import watched
from ..page.test_access import AXE, violations

# Of the sweep's two figures.
MEASURED, PREDICTED = "#sweep-measured", "#sweep-predicted"


def points(page: Page, figure: str) -> Locator:
    return page.locator(f"{figure} tbody tr")


def line(page: Page, figure: str) -> Locator:
    return page.locator(f"{figure} .sweep-line")


@pytest.mark.slow
def test_the_tab_measures_stops_and_predicts(server: str, context: BrowserContext) -> None:
    with watched(context, server) as page:
        fill(page, tokens=20)
        page.get_by_role("tab", name="Sweep").click()
        expect(page.locator("#sweep-measure")).to_be_visible()
        expect(points(page, MEASURED)).to_have_count(0)
        page.click("#sweep-measure")
        expect(line(page, MEASURED)).to_have_text(re.compile(r"Point \d+ of 12: .+ About \d+ s left\."))
        expect(page.locator("#sweep-measure")).to_be_disabled()
        # The first points are there while the sweep goes on.
        expect(points(page, MEASURED).nth(1)).to_be_visible()
        expect(line(page, MEASURED)).to_have_attribute("data-phase", "running")
        page.click("#sweep-stop")
        expect(line(page, MEASURED)).to_have_text("Stopped. The points so far are kept.")
        expect(page.locator("#sweep-measure")).to_be_enabled()
        kept = points(page, MEASURED).count()
        assert 2 <= kept < 12
        page.wait_for_function("() => document.querySelector('#sweep-measured .plot').data?.length >= 2")
        assert page.locator(f"{MEASURED} .badge-predicted").count() == 0
        _predict(page)
        _exports(page, kept)
        _looks(page)


def _predict(page: Page) -> None:
    """The device is free again, so a prediction comes at once, with the acceptance of what was measured."""
    page.click("#sweep-predict")
    expect(points(page, PREDICTED)).to_have_count(21)
    assert page.locator(f"{PREDICTED} .badge-predicted").count() == 2
    assert page.locator(f"{PREDICTED} figcaption .badge-predicted").inner_text() == "predicted"
    page.locator(f"{PREDICTED} .sweep-assumed summary").click()
    expect(page.locator(f"{PREDICTED} .sweep-assumed li").first).to_contain_text("measured in the last")
    page.fill("#sweep-acceptance input, #sweep-acceptance textarea", "2")
    page.click("#sweep-predict")
    expect(line(page, PREDICTED)).to_have_text(re.compile("Acceptance must be a number from 0 to 1"))
    expect(points(page, PREDICTED)).to_have_count(21)
    page.fill("#sweep-acceptance input, #sweep-acceptance textarea", "0.5")
    page.click("#sweep-predict")
    expect(page.locator(f"{PREDICTED} .sweep-of")).to_contain_text("A100 with 7.8B and 310M; acceptance 0.50")


def _exports(page: Page, kept: int) -> None:
    for figure, kind, count in ((MEASURED, "measured", kept), (PREDICTED, "predicted", 21)):
        with page.expect_download() as json_file:
            page.click(f"{figure} [data-take=json]")
        document = json.loads(Path(json_file.value.path()).read_text(encoding="utf-8"))
        assert (document["sweep"], document["kind"], len(document["points"])) == (1, kind, count)
        with page.expect_download() as csv_file:
            page.click(f"{figure} [data-take=csv]")
        head, *rows = Path(csv_file.value.path()).read_text(encoding="utf-8").splitlines()
        assert head.startswith("kind,batch,draft_length,speedup") and len(rows) == count
        assert all(row.startswith(f"{kind},") for row in rows)


def _looks(page: Page) -> None:
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = {}
    for theme in ("light", "dark"):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        page.wait_for_timeout(500)
        found[theme] = violations(page)
    page.evaluate("document.body.classList.remove('dark')")
    assert not any(found.values()), json.dumps(found, indent=1)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
