"""Controls: their names, what charts offer, what covers Run, and a prediction while a race has the device."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .browser import fill
from .conftest import watched

pytestmark = pytest.mark.slow
NAMED = re.compile(r"\w")
# Opens the hover box of each chart that has data, at its middle, and returns the texts of all boxes.
HOVERED = """() => [...document.querySelectorAll("[data-chart] .plot, .summary-figure .plot")].flatMap((plot) => {
  if (!plot.data?.length) return [];
  const [low, high] = plot._fullLayout.xaxis.range.map(Number);
  Plotly.Fx.hover(plot, { xval: (low + high) / 2 });
  return [...plot.querySelectorAll(".hoverlayer text")].map((text) => text.textContent);
})"""
# Whether the bar with all lanes' figures covers no part of Run.
APART = """() => {
  const [bar, run] = [".glance", "#run"].map((name) => document.querySelector(name).getBoundingClientRect());
  return bar.top >= run.bottom || bar.bottom <= run.top || bar.height === 0;
}"""
BUTTONS = "() => [...document.querySelectorAll('.modebar-btn')].map(({ dataset }) => dataset.title)"


def test_every_slider_and_button_has_a_name_of_its_own(opened: Page) -> None:
    opened.get_by_role("tab", name="How it works").click()
    for role in ("slider", "combobox", "checkbox", "spinbutton"):
        controls = opened.get_by_role(role, include_hidden=True)
        assert opened.get_by_role(role, name=NAMED, include_hidden=True).count() == controls.count(), role
    assert opened.get_by_role("slider", include_hidden=True).count() > 20
    assert opened.get_by_role("button", name="Formula", exact=True, include_hidden=True).count() == 0
    assert opened.get_by_role("button", name=re.compile("^Formula: "), include_hidden=True).count() > 20


def test_charts_offer_no_dead_button_and_hover_shows_rounded_numbers(opened: Page) -> None:
    opened.evaluate("() => Bass.plots.load().then(() => Bass.plots.drawAll())")
    opened.wait_for_function("() => document.querySelector('[data-chart=race] .plot').data?.length > 1")
    titles = opened.evaluate(BUTTONS)
    assert titles and not [title for title in titles if re.search("share|cloud|studio|edit", title, re.IGNORECASE)]
    boxes = opened.evaluate(HOVERED)
    assert any(re.search(r"\d", text) for text in boxes)
    assert [text for text in boxes if re.search(r"\.\d{4}|^\(", text)] == []


def test_a_prediction_does_not_wait_for_the_device(page: Page, context: BrowserContext, server: str) -> None:
    fill(page, batch=16, tokens=1024)
    page.click("#run")
    expect(page.locator("#lane-regular .state")).to_have_text("Running")
    with watched(context, server) as other:
        other.get_by_role("tab", name="Sweep").click()
        other.click("#sweep-predict")
        expect(other.locator("#sweep-predicted tbody tr")).to_have_count(21)
    assert page.locator("#status-line .message").get_attribute("data-phase") == "running"
    page.click("#stop")
    expect(page.locator("#status-line .message")).to_have_text("Stopped.")


def test_at_twice_the_size_nothing_covers_run(page: Page) -> None:
    page.locator("[data-recording=win]").click()
    page.wait_for_function("() => Bass.tape.state.recorded?.name === 'win'")
    page.evaluate("() => Bass.tape.live()")
    page.set_viewport_size({"width": 700, "height": 450})
    covered = page.locator(".glance:visible")
    seen = 0
    for top in range(0, 900, 60):
        page.evaluate("(top) => scrollTo(0, top)", top)
        page.wait_for_function(APART)
        seen += covered.count()
    assert seen, "the bar was never shown"
    page.set_viewport_size({"width": 1400, "height": 900})
