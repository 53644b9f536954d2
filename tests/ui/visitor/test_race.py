"""What a visitor meets around a race: formulas, drawn charts, beginnings of texts, keys, a phone, marks, the bar.

Contract: one page with one finished race is shared; the tests here that run another one say so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from ui.page.events import Snapshot
from ui.page.request import RaceRequest
from ui.race.formulas import FORMULAS

from ..browser import LANES, fill, run_to_the_end
from ..conftest import hosted, watched

pytestmark = pytest.mark.slow
# Figures, and where their question mark must be.
FIGURES = {
    "[data-figure=ms_per_token]": ".numbers",
    ".figures [data-figure]": ".figures > div",
    ".verdict-head": ".verdict-line",
    ".strip figcaption": ".strip-line",
    ".cache-part h2": ".part-head",
    ".chart h3": ".titled",
    ".readings dd": ".readings > div",
    ".round th": "th",
    ".figures-table tbody th": "th",
}
WITHOUT_MARK = """figures => Object.entries(figures).flatMap(([figure, place]) => {
  const found = [...document.querySelectorAll(figure)];
  if (!found.length) return [`none: ${figure}`];
  return found.filter((one) => !one.closest(place)?.querySelector(".what")).map(() => figure);
})"""
# Charts and timelines that show no data, wherever the page is scrolled to.
UNDRAWN = """() => [...document.querySelectorAll("[data-chart] .plot")].filter((plot) =>
  !plot.data?.length && !plot.emptyAs?.startsWith("n/a")).map((plot) => plot.closest("[data-chart]").dataset.chart)
  .concat([...document.querySelectorAll(".lane:not([hidden]) .strip")].filter((strip) => !strip.blocks?.length)
  .map(() => "strip"))"""
# What is left of a kind's look without colours: lines, bars, borders and hatchings.
LOOK = """([selector]) => {
  const style = getComputedStyle(document.querySelector(selector));
  const colour = /rgba?\\([^)]*\\)|color\\([^)]*\\)/g;
  const bare = (text) => text.replace(colour, (one) => (/, 0\\)$/.test(one) ? "none" : "ink"));
  const drawn = [style.boxShadow, style.backgroundImage].map(bare);
  const lines = [style.textDecorationLine, style.textDecorationStyle, style.borderStyle, style.borderWidth];
  return [...lines, ...drawn].join(" ");
}"""


@pytest.fixture(scope="module")
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """A page with a finished race of three rows, whose texts are longer than their windows; never scrolled."""
    with watched(context, server) as page:
        fill(page, batch=3, tokens=300)
        run_to_the_end(page)
        yield page


def test_everything_is_drawn_at_the_end_though_nobody_scrolled(page: Page) -> None:
    page.wait_for_function(f"() => !({UNDRAWN})().length")
    assert page.evaluate("scrollY") == 0
    expect(page.locator(".cache-line")).to_contain_text("Round ")


def test_every_figure_has_a_question_mark(page: Page) -> None:
    assert page.evaluate(WITHOUT_MARK, FIGURES) == []
    keys = page.eval_on_selector_all(".what", "all => all.map(e => e.getAttribute('popovertarget').slice(5))")
    assert set(keys) <= FORMULAS.keys()
    described = page.eval_on_selector_all(
        ".what", "all => all.every(e => document.getElementById(e.getAttribute('aria-describedby')).textContent)"
    )
    assert described
    # The mark is no part of a label.
    expect(page.locator(".figures-table tbody th").first).to_have_text("ms per token of one sequence")


def test_a_formula_opens_by_pointer_and_keyboard_beside_its_figure(page: Page) -> None:
    opened, mark = page.locator(".formula:popover-open"), page.locator("#lane-bass .numbers .unit .what")
    expect(opened).to_have_count(0)
    for by in ("pointer", "keyboard"):
        mark.click() if by == "pointer" else mark.press("Enter")
        expect(opened).to_contain_text(FORMULAS["ms_per_token"].text)
        box, at = opened.bounding_box(), mark.bounding_box()
        assert box and at and box["x"] >= 0 and box["x"] + box["width"] <= 1400
        assert min(abs(box["y"] - at["y"] - at["height"]), abs(at["y"] - box["y"] - box["height"])) < 12
        page.keyboard.press("Escape")
        expect(opened).to_have_count(0)
    # One more opens and closes the first.
    mark.click()
    page.locator("#lane-regular .figures .what").first.click()
    expect(opened).to_have_count(1)
    expect(opened).to_contain_text(FORMULAS["speedup"].text)
    page.keyboard.press("Escape")


def test_ms_per_token_is_of_one_sequence_wherever_it_stands(page: Page) -> None:
    texts = page.evaluate(
        "() => document.querySelector('#results').innerText.split('\\n').filter(t => /ms per token/i.test(t))"
    )
    assert len(texts) >= 5 and [text for text in texts if "of one sequence" not in text] == []


def test_texts_stand_at_their_beginning_after_the_end(page: Page) -> None:
    for lane in LANES:
        for box in page.locator(f"#lane-{lane} .window").all():
            top = "e => e.querySelector('.token').getBoundingClientRect().top - e.getBoundingClientRect().top"
            assert -2 <= box.evaluate(top) < 30
            goes_on = box.evaluate("e => [e.classList.contains('goes-on'), e.scrollHeight > e.clientHeight + 2]")
            assert goes_on[0] == goes_on[1]
    assert page.locator(".window.goes-on").count() > 0


def test_kinds_of_tokens_and_cells_differ_without_colours(page: Page) -> None:
    kinds = ("sampled", "accepted", "recovered", "bonus")
    for place in (".legend .", ".cache-key .cell-"):
        looks = {kind: page.evaluate(LOOK, [f"{place}{kind}"]) for kind in kinds}
        assert len(set(looks.values())) == len(kinds), looks
    shown = [kind for kind in kinds[1:] if page.locator(f".sequence .{kind}").count()]
    assert {"accepted", "recovered"} <= set(shown)
    for kind in shown:
        assert page.evaluate(LOOK, [f".sequence .{kind}"]) == page.evaluate(LOOK, [f".legend .{kind}"])


def test_ctrl_enter_runs_and_rows_that_end_together_are_not_first_and_last(page: Page) -> None:
    """Runs a greedy race: the rows of regular decoding end together, those that take turns do not."""
    fill(page, batch=2, tokens=12, temperature=0)
    page.locator("#prompt textarea").press("Control+Enter")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done", timeout=120_000)
    expect(page.locator("#lane-speculative .medal", has_text="Last")).to_have_count(1)
    medals = {
        lane: page.eval_on_selector_all(f"#lane-{lane} .medal", "all => all.map(e => e.textContent)")
        for lane in LANES
    }
    assert medals["regular"] == ["", ""] and sorted(medals["speculative"]) == ["First", "Last"]
    cells = (
        page.locator(".figures-table tr", has_text="per-token latency, First").locator("td").all_text_contents()
    )
    assert cells[0] == "ended together" and cells[1] != "ended together"
    bars = "plot => plot.data.filter(t => t.type === 'bar').map(t => [t.name, t.x, t.y.map(v => v === null)])"
    assert page.eval_on_selector(".summary-figure .plot", bars)[0] == [
        "Regular",
        ["First", "Last", "All"],
        [True, True, False],
    ]
    # A single row has neither.
    fill(page, batch=1, tokens=12, temperature=0)
    run_to_the_end(page)
    labels = page.locator(".figures-table tbody th").all_text_contents()
    assert [label for label in labels if label.startswith("per-token")] == ["per-token latency, All, ms"]
    assert all(x == ["All"] for _, x, _ in page.eval_on_selector(".summary-figure .plot", bars))


def test_a_print_draws_what_is_out_of_sight(page: Page) -> None:
    """Prints in the middle of a race."""
    page.evaluate("scrollTo(0, 0)")
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function("() => document.querySelector('#lane-bass .sequence')?.textContent.length > 20")
    run = "JSON.parse(JSON.stringify(Bass.run().head.run))"
    drawn = f"document.querySelector('[data-chart=race] .plot').layout.uirevision === {run}"
    assert page.evaluate(drawn) is False
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(drawn) is True
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.click("#stop")
    expect(page.locator("#run")).to_be_enabled()


def test_on_a_phone_the_lanes_come_into_view_and_all_figures_stay_there(page: Page) -> None:
    """Runs a race on a phone."""
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        fill(page, batch=2, tokens=40)
        run_to_the_end(page)
        expect(page.locator(".verdict-head")).to_be_in_viewport()
        bar = page.locator(".glance")
        expect(bar).to_be_visible()
        for lane in LANES:
            for figure, place in (("ms_per_token", ".glance-ms"), ("speedup", ".glance-speedup")):
                own = page.text_content(f"#lane-{lane} [data-figure={figure}]")
                shown = page.text_content(f"[data-glance={lane}] {place}")
                assert own and shown == (f"{own} ms" if figure == "ms_per_token" else own)
        page.locator("[data-glance=bass]").click()
        expect(page.locator("#lane-bass h2")).to_be_in_viewport()
        expect(page.locator(".glance-stop")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        page.set_viewport_size({"width": 1400, "height": 900})
    expect(page.locator(".glance")).to_be_hidden()


def test_a_bar_shows_how_far_the_measurements_are(context: BrowserContext) -> None:
    told, go = [{"done": 0.25, "left_ms": 12_400.0}, {"done": 0.5, "left_ms": None}], Event()
    device: Any = {"name": "toy", "kind": "cpu"}
    bare: Any = {"done": False, "scheduling": "fair", "elapsed_ms": 1.0, "lanes": {}, "device": device}

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for measuring in told:
            yield bare | {"phase": "measuring", "measuring": measuring}
            assert go.wait(100)
            go.clear()

    with hosted(source) as address, watched(context, address) as page:
        bar, words = page.locator(".measuring progress"), page.locator(".measuring span")
        expect(bar).to_be_hidden()
        page.click("#run")
        expect(words).to_have_text("25 %, about 15 s left")
        expect(page.locator(".message")).to_have_text("Measuring once what a round costs on this machine")
        assert bar.evaluate("e => e.value") == 0.25
        expect(page.locator("#lane-bass .state")).to_have_text("Waiting")
        go.set()
        expect(words).to_have_text("50 %")
        go.set()
        expect(bar).to_be_hidden()
        expect(page.locator("#lane-bass .state")).to_have_text("Ready")
