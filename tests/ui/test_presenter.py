"""Presenter mode (larger type, settings in one line, keys that work only there) and printing with every chart."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .browser import (
    PATIENCE_MS,
    assert_accessible,
    assert_fits,
    choose_option,
    fill,
    loaded,
    open_settings,
    run_to_the_end,
    shown,
)
from .conftest import watched

pytestmark = pytest.mark.slow

READ = (
    ".sequence", ".verdict-head", ".verdict li", ".lane h2", ".figures .of-speedup dd",
    ".figures .of-ms_per_token dd", ".figures dt", ".state", ".axis-means",
    "[data-chart=latency] .xtick text", "[data-chart=latency] .g-xtitle text", ".switch",
)  # fmt: skip
SIZES = """(all) => Object.fromEntries(all.map((one) => {
  const style = getComputedStyle(document.querySelector(one));
  return [one, parseFloat(style.fontSize)];
}))"""
# Labels of the time axis that touch a button below them.
TOUCHING = """() => {
  const box = (one) => one.getBoundingClientRect();
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const buttons = [...document.querySelectorAll(".axis-play button")].filter((one) => one.checkVisibility());
  return [...document.querySelectorAll(".axis-ruler span")]
    .filter((label) => buttons.some((button) => touch(box(label), box(button)))).map((label) => label.textContent);
}"""
WRITING = """() => ["speculative", "bass"].every((name) =>
  document.querySelector(`#lane-${name} .sequence`)?.textContent.length > 20)"""
# Records the page while it is printed, with each chart's width, its drawing's width, and its lines and bars.
PRINTED = """() => addEventListener("beforeprint", () => {
  const plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.checkVisibility());
  window.printed = {
    body: document.body.className, page: document.documentElement.scrollWidth,
    settings: document.querySelector(".print-settings").innerText,
    form: document.querySelector("#settings").checkVisibility(),
    tabs: [...document.querySelectorAll(".bass-lanes, .bass-how")].filter((one) => one.checkVisibility()).length,
    cut: [...document.querySelectorAll(".window")].filter(
      (box) => box.firstElementChild.offsetHeight > box.clientHeight + 1).length,
    whole: [...document.querySelectorAll(".lane, .chart")].map((one) => getComputedStyle(one).breakInside),
    tracks: [...document.querySelectorAll(".axis canvas")].map((one) => one.width / one.clientWidth),
    charts: plots.map((plot) => ({
      name: plot.closest("figure").querySelector("h3")?.textContent ?? plot.ariaLabel, width: plot.clientWidth,
      drawn: plot.querySelector(".main-svg")?.clientWidth ?? 0,
      marks: plot.querySelectorAll(".js-line, .point path").length,
      words: plot.querySelector(".annotation")?.textContent ?? "",
      ink: plot.querySelector(".xtick text, .annotation text")?.style.fill ?? "",
    })),
  };
})"""


def sizes(page: Page) -> dict[str, float]:
    """Font sizes in px, after the chart in view is redrawn in this size."""
    page.locator("[data-chart=latency]").scroll_into_view_if_needed()
    by = page.evaluate("() => Number(getComputedStyle(document.body).getPropertyValue('--type'))")
    page.wait_for_function(
        "(size) => { const tick = document.querySelector('[data-chart=latency] .xtick text');"
        " return tick && Math.abs(parseFloat(getComputedStyle(tick).fontSize) - size) < 0.1; }",
        arg=12 * by,
    )
    font_sizes: dict[str, float] = page.evaluate(SIZES, list(READ))
    return font_sizes


def test_type_is_larger_and_the_settings_are_one_line(page: Page) -> None:
    loaded(page)
    fill(page, prompt="Hello\nyou", tokens=24)
    run_to_the_end(page)
    before, texts = sizes(page), shown(page, "bass")
    page.click("[data-present]")
    assert page.url.endswith("&present=1")
    larger = sizes(page)
    factors = {name: size / before[name] for name, size in larger.items()}
    # The figures grow less, so that the lanes stay in sight.
    figures = [factors.pop(name) for name in (".figures .of-speedup dd", ".figures dt")]
    assert factors == pytest.approx(dict.fromkeys(factors, 1.6), rel=0.02) and min(figures) > 1.1
    assert_fits(page, 390, 1400, 1920)
    line, prompt = page.locator(".present-line"), page.locator("#prompt textarea")
    expect(line).to_contain_text("“Hello you”")
    expect(line).to_contain_text("batch 2 · temperature 0.9 · 24 tokens · drafts: fixed, 3")
    expect(prompt).to_be_hidden()
    expect(page.locator("#run")).to_be_visible()
    assert_accessible(page)
    line.click()
    expect(line).to_have_attribute("aria-expanded", "true")
    prompt.fill("Another")
    expect(line).to_contain_text("Next: “Another”")
    line.click()
    expect(prompt).to_be_hidden()
    page.click("[data-present]")
    assert "present" not in page.url
    expect(prompt).to_be_visible()
    assert sizes(page) == before and shown(page, "bass") == texts
    assert page.evaluate("() => Bass.run().done")


def bottom(page: Page, selector: str) -> float:
    """The lower edge of the lowest of these elements, in px from the top of the page."""
    edges = "all => Math.max(...all.map((one) => one.getBoundingClientRect().bottom + scrollY))"
    return float(page.eval_on_selector_all(selector, edges))


def test_axis_and_steps_are_in_view_on_a_low_screen(context: BrowserContext, shelf: str) -> None:
    """Checks a page that only plays recordings, which has the same presenter mode as one with a model."""
    with watched(context, f"{shelf}/?present=1") as page:
        page.set_viewport_size({"width": 1280, "height": 720})
        page.click("#run")
        page.keyboard.press("c")
        expect(page.locator("#lane-regular .state")).to_contain_text("Finished")
        for button in ("#run", "#stop"):
            expect(page.locator(button)).to_be_in_viewport(ratio=1)
        assert page.locator("#lane-bass .sequence").count() == 4
        assert bottom(page, ".sequences") <= 720
        wide = "all => all.filter((one) => one.scrollWidth > one.clientWidth).length"
        assert page.eval_on_selector_all("html, .lane, .figures", wide) == 0
        assert page.evaluate(TOUCHING) == []
        page.set_viewport_size({"width": 1400, "height": 900})
        assert page.evaluate(TOUCHING) == []
        page.set_viewport_size({"width": 1280, "height": 720})
        page.evaluate("() => document.activeElement.blur()")
        page.keyboard.press(" ")
        expect(page.locator(".step-part")).to_be_visible()
        expect(page.locator(".verdict")).to_be_hidden()
        assert bottom(page, ".code") <= 720
        page.keyboard.press("Escape")
        expect(page.locator(".verdict")).to_be_visible()
        assert_accessible(page)


def test_keys_work_only_in_presenter_mode_and_not_in_fields(page: Page) -> None:
    temperature, panel, status = (
        page.locator(at) for at in ("#temperature input", ".step-part", "#status-line .message")
    )
    prompt, keys = page.locator("#prompt textarea"), page.locator("dialog.keys")
    open_settings(page)
    expect(temperature).to_have_value("0")
    for key in ("5", " ", "?"):
        page.keyboard.press(key)
    expect(panel).to_be_hidden()
    expect(keys).to_be_hidden()
    page.click("[data-present]")
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("5")
    expect(page.locator(".present-line")).to_contain_text("temperature 1.5")
    expect(temperature).to_have_value("1.5")
    page.click(".present-line")
    prompt.fill("")
    prompt.press_sequentially("rs1? ")
    expect(prompt).to_have_value("rs1? ")
    expect(temperature).to_have_value("1.5")
    assert page.evaluate("() => Bass.run()") is None
    fill(page, batch=8, tokens=1000, temperature=0.9)
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Escape")
    expect(prompt).to_be_hidden()
    page.keyboard.press("r")
    # The question "Bet first" has the focus, and its buttons do not step.
    expect(page.locator("[data-bet=regular]")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(panel).to_be_hidden()
    page.keyboard.press("c")
    page.wait_for_function(WRITING, timeout=PATIENCE_MS)
    page.keyboard.press("s")
    expect(status).to_have_text("Stopped.")
    expect(page.locator("#run")).to_be_enabled()
    page.click(".present-line")
    page.click(".present-line")
    page.keyboard.press(" ")
    expect(panel).to_be_visible()
    expect(prompt).to_be_hidden()
    page.evaluate("() => document.querySelector('[data-drafted]').click()")
    page.evaluate("() => document.activeElement.blur()")
    where = page.locator(".step-part .step-line")
    expect(where).to_contain_text("Round ")
    first = where.text_content() or ""
    page.keyboard.press("ArrowLeft")
    expect(where).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    # A button that was clicked does not swallow the arrow keys.
    page.click("[data-switch=whole]")
    page.keyboard.press("ArrowRight")
    expect(panel).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("?")
    expect(keys).to_be_visible()
    expect(keys.locator("dt")).to_contain_text(["r", "s", "Space", "1", "7"])
    expect(keys).to_contain_text("preset “Unrelated words”")
    page.keyboard.press("1")
    expect(temperature).to_have_value("0.9")
    keys.locator("[data-keys-on]").uncheck()
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    assert "keys=off" in page.url
    for key in ("1", " ", "?", "r"):
        page.keyboard.press(key)
    expect(keys).to_be_hidden()
    expect(panel).to_be_hidden()
    expect(temperature).to_have_value("0.9")
    expect(status).to_have_text("Stopped.")


def test_a_print_has_the_settings_all_texts_and_every_chart(page: Page) -> None:
    loaded(page)
    fill(page, prompt="Print me", batch=3, tokens=300)
    open_settings(page)
    choose_option(page, "draft-length", "Algorithm 1")
    run_to_the_end(page)
    page.evaluate("() => { document.body.classList.add('dark'); scrollTo(0, 0); }")
    page.click("[data-present]")
    page.evaluate(PRINTED)
    assert page.pdf(print_background=True).startswith(b"%PDF")
    seen: dict[str, Any] = page.evaluate("() => window.printed")
    assert seen["body"].split() == ["printing"] and seen["page"] <= 1400 and not seen["form"]
    assert seen["tabs"] == 1
    assert "Print me" in seen["settings"] and "temperature" in seen["settings"] and "0.9" in seen["settings"]
    assert seen["cut"] == 0 and set(seen["whole"]) == {"avoid"} and min(seen["tracks"]) > 2.9
    charts = {chart["name"]: chart for chart in seen["charts"]}
    assert len(charts) >= 8
    for name, chart in charts.items():
        assert abs(chart["width"] - chart["drawn"]) <= 1, name
        assert chart["marks"] > 0 or chart["words"] == "n/a", name
        assert chart["ink"] == "rgb(71, 85, 105)", name
    drawn = (
        "ms per token of one sequence",
        "The race",
        "Draft acceptance rate",
        "Draft length",
        "Device",
        "Keys and values",
    )
    assert all(charts[name]["marks"] for name in (*drawn, "Per-token latency and acceptance by position"))
    assert charts["The race"]["marks"] == 3
    # The page looks as before.
    assert set(page.evaluate("() => document.body.className").split()) == {"dark", "presenting"}
    expect(page.locator(".print-settings")).to_be_hidden()
    assert page.evaluate("() => Bass.plots.type()") == 1.6
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    page.wait_for_function(
        "() => { const plot = document.querySelector('[data-chart=race] .plot');"
        " return Math.abs(plot.clientWidth - plot.querySelector('.main-svg').clientWidth) <= 1; }"
    )
    page.get_by_role("tab", name="How it works").click()
    page.evaluate("() => scrollTo(0, 0)")
    page.pdf()
    seen = page.evaluate("() => window.printed")
    assert seen["tabs"] == 1
    assert [(one["name"], one["marks"] > 1, one["width"] == one["drawn"]) for one in seen["charts"]] == [
        ("Expected speed-up over token acceptance", True, True)
    ]
