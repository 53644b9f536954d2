"""Races in a real Chromium: everything that a reader sees, compared with the results of the API.

The first test is quick, with one server and one race. In the slow tests, a visitor stops the race, slows it
down, sends hostile text or uses a phone.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import Page, expect

from bass_core import METHODS
from ui.race.formulas import FORMULAS

from .browser import (
    LANES,
    assert_fits,
    compared,
    exported,
    fill,
    fill_more,
    loaded,
    run_to_the_end,
    saved,
    shown,
    texts_are,
)

# Records the length of each lane's text at every change.
WATCH_GROWTH = """() => {
  window.growth = {};
  for (const lane of ["regular", "speculative", "bass"]) {
    const seen = window.growth[lane] = new Set();
    const length = () => [...document.querySelectorAll(`#lane-${lane} .sequence`)]
      .reduce((sum, e) => sum + e.textContent.length, 0);
    new MutationObserver(() => seen.add(length()))
      .observe(document.getElementById(`lane-${lane}`), { childList: true, subtree: true, characterData: true });
  }
}"""
# Figures, and the elements that must contain their question marks.
FIGURES = {
    ".figures [data-figure]": ".figures > div",
    ".verdict-head": ".verdict",
    ".axis-words": ".axis-play",
    ".cache-part h2": ".part-head",
    ".chart h3": ".titled",
    ".readings dd": ".readings > div",
    ".round-scroll tr:last-child th": "th",
    ".figures-table tbody th": "th",
}
WITHOUT_MARK = """figures => Object.entries(figures).flatMap(([figure, place]) => {
  const found = [...document.querySelectorAll(figure)];
  if (!found.length) return [`none: ${figure}`];
  return found.filter((one) => !one.closest(place)?.querySelector(".what, .term[title]")).map(() => figure);
})"""
# Charts and lanes on the axis without data, in view or not.
UNDRAWN = """() => [...document.querySelectorAll("[data-chart] .plot")].filter((plot) =>
  !plot.data?.length && !plot.emptyAs?.startsWith("n/a")).map((plot) => plot.closest("[data-chart]").dataset.chart)
  .concat([...document.querySelectorAll("[data-axis]")].filter((row) => !row.bars?.length).map(() => "axis"))"""
# The names of each chart's lines and bars.
DRAWN = """() => Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((figure) =>
  [figure.dataset.chart, (figure.querySelector(".plot").data ?? []).map((trace) => trace.name)]))"""
# The look of a kind of token or cell without its colours: lines, bars, borders and hatchings.
LOOK = """([selector]) => {
  const style = getComputedStyle(document.querySelector(selector));
  const colour = /rgba?\\([^)]*\\)|color\\([^)]*\\)/g;
  const bare = (text) => text.replace(colour, (one) => (/, 0\\)$/.test(one) ? "none" : "ink"));
  const drawn = [style.boxShadow, style.backgroundImage].map(bare);
  const lines = [style.textDecorationLine, style.textDecorationStyle, style.borderStyle, style.borderWidth];
  return [...lines, ...drawn].join(" ");
}"""


def test_the_page_shows_the_whole_race(page: Page, server: str) -> None:
    loaded(page)
    expect(page.locator(".verdict-head")).to_have_text("Three decoders, one model: which is fastest?")
    fill(page, batch=3, tokens=200, seed=11)
    page.evaluate(WATCH_GROWTH)
    run_to_the_end(page)
    final = (
        Client(server, verbose=False).submit("Hello", 3, 200, 0.9, 11, draft_length="3", api_name="/race").result()
    )
    page.wait_for_function(f"() => !({UNDRAWN})().length")
    assert page.evaluate("scrollY") == 0, "everything is drawn though nobody scrolled"
    _texts(page, final)
    _figures(page)
    _question_marks(page)
    _kinds(page)
    _tips(page, final)
    _exports(page, final)
    for width, rows in ((390, 3), (1024, 1), (1400, 1)):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = [page.locator(f"#lane-{lane}").bounding_box() for lane in LANES]
        assert len({round(box["y"]) for box in boxes if box}) == rows
        assert all(box and box["width"] >= 220 for box in boxes)
    assert_fits(page, 390, 1024, 1400)


def _texts(page: Page, final: dict[str, Any]) -> None:
    """The texts equal the API's. They grew during the race; after it, their windows show the beginning."""
    texts_are(page, final)
    for lane in LANES:
        lengths = page.evaluate("lane => [...window.growth[lane]]", lane)
        assert len(set(lengths)) > 3 and lengths[-1] == max(lengths)
        for box in page.locator(f"#lane-{lane} .window").all():
            top = "e => e.querySelector('.token').getBoundingClientRect().top - e.getBoundingClientRect().top"
            assert -2 <= box.evaluate(top) < 30
            goes_on = box.evaluate("e => [e.classList.contains('goes-on'), e.scrollHeight > e.clientHeight + 2]")
            assert goes_on[0] == goes_on[1]
    assert page.locator(".window.goes-on").count() > 0


def _figures(page: Page) -> None:
    """Figures and charts have data or show n/a. Every "ms per token" outside the lanes says "of one sequence"."""
    for lane in LANES:
        figures = page.eval_on_selector_all(f"#lane-{lane} [data-figure]", "all => all.map(e => e.textContent)")
        assert (figures.count("–"), len(figures)) == (1 if lane == "regular" else 0, 3)
    expect(page.locator(".verdict-head")).to_have_attribute("aria-live", "polite")
    expect(page.locator(".verdict li")).to_have_count(2)
    drawn = page.evaluate(DRAWN)
    assert drawn["latency"] == drawn["race"] == ["Regular", "Speculative", "BASS"]
    assert drawn["acceptance"] == drawn["lengths"] == ["Speculative", "BASS"]
    assert (drawn["device"], drawn["memory"]) == (["CPU share"], ["Memory"])
    # This test's server has no GPU.
    expect(page.locator("[data-chart=flops]")).to_be_hidden()
    for key in ("gpu_utilization", "gpu_power_w", "flops_utilization"):
        assert page.inner_text(f"[data-reading={key}]") == "n/a"
    page.wait_for_function("() => document.querySelector('.summary-figure .plot').data?.length")
    kinds = page.eval_on_selector(".summary-figure .plot", "plot => plot.data.map(t => [t.type, t.x.length])")
    assert kinds[:3] == [["bar", 3]] * 3 and [kind for kind, _ in kinds[3:]] == ["scatter"] * 2
    expect(page.locator(".cache-line")).to_contain_text("Round ")
    texts = page.inner_text("#results").split("\n")
    # Only lanes have the short label.
    assert texts.count("ms per token") == len(LANES)
    times = [text for text in texts if "ms per token" in text.lower() and text != "ms per token"]
    assert len(times) >= 2 and [text for text in times if "of one sequence" not in text] == []


def _question_marks(page: Page) -> None:
    """Every figure has a mark that opens its formula next to it, by pointer and keyboard."""
    assert page.evaluate(WITHOUT_MARK, FIGURES) == []
    keys = page.eval_on_selector_all(".what", "all => all.map(e => e.getAttribute('popovertarget').slice(5))")
    assert set(keys) <= FORMULAS.keys()
    assert page.eval_on_selector_all(
        ".what", "all => all.every(e => document.getElementById(e.getAttribute('aria-describedby')).textContent)"
    )
    # The mark is not part of the label.
    expect(page.locator(".figures-table tbody th").first).to_have_text("ms per token of one sequence")
    opened, mark = page.locator(".formula:popover-open"), page.locator("#lane-bass .of-ms_per_token .term")
    expect(opened).to_have_count(0)
    for by in ("pointer", "keyboard"):
        mark.click() if by == "pointer" else mark.press("Enter")
        expect(opened).to_contain_text(FORMULAS["ms_per_token"].text)
        box, at = opened.bounding_box(), mark.bounding_box()
        assert box and at and box["x"] >= 0 and box["x"] + box["width"] <= 1400
        assert min(abs(box["y"] - at["y"] - at["height"]), abs(at["y"] - box["y"] - box["height"])) < 12
        page.keyboard.press("Escape")
        expect(opened).to_have_count(0)
    # A lane's name opens the description of its method, from the keyboard too.
    page.locator("#lane-bass h2 .term").press("Enter")
    expect(opened).to_contain_text(METHODS["bass"].about)
    page.keyboard.press("Escape")
    # Opening another formula closes the first.
    mark.click()
    page.locator("#lane-bass .of-speedup .term").click()
    expect(opened).to_have_count(1)
    expect(opened).to_contain_text(FORMULAS["speedup"].text)
    page.keyboard.press("Escape")


def _kinds(page: Page) -> None:
    """Kinds of tokens and of cells differ without colours."""
    kinds = ("sampled", "accepted", "recovered", "bonus")
    for place in (".legend .", ".cache-key .cell-"):
        looks = {kind: page.evaluate(LOOK, [f"{place}{kind}"]) for kind in kinds}
        assert len(set(looks.values())) == len(kinds), looks
    seen = [kind for kind in kinds[1:] if page.locator(f".sequence .{kind}").count()]
    assert {"accepted", "recovered"} <= set(seen)
    for kind in seen:
        assert page.evaluate(LOOK, [f".sequence .{kind}"]) == page.evaluate(LOOK, [f".legend .{kind}"])


def _tips(page: Page, final: dict[str, Any]) -> None:
    """Tips show round, position, p, q and verdict. Keys move from token to token and open the inspector."""
    record, row = round_with(final, lambda row: 0 < row["accepted"] < len(row["drafted"]))
    spans = page.locator("#lane-bass .sequence").nth(row["sequence"]).locator(".token")
    spans.nth(row["start"]).hover()
    tip = page.locator(".token-tip")
    expect(tip).to_contain_text(f"round {record['round']}, position 1 ({len(row['drafted'])} drafted)")
    expect(tip).to_contain_text(f"p(x) {row['p'][0]:.3f}, q(x) {row['q'][0]:.3f}")
    expect(tip).to_contain_text("accepted:")
    spans.nth(row["start"] + row["accepted"]).hover()
    expect(tip).to_contain_text("recovered")
    expect(tip).to_contain_text(f"position {row['accepted'] + 1} ")
    expect(tip).to_contain_text("≥ h")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()
    page.locator("#lane-bass .window").first.focus()
    page.keyboard.press("Home")
    expect(tip).to_contain_text("token 1,")
    expect(page.locator(".board-spoken")).to_contain_text("prefill")
    page.keyboard.press("End")
    expect(tip).not_to_contain_text("token 1,")
    at = int(re.findall(r"token (\d+),", tip.text_content() or "")[0]) - 1
    bass = final["lanes"]["bass"]
    assert not any(bass["sequences"][0]["pieces"][at + 1 :]), "only tokens without a text come after it"
    page.keyboard.press("Enter")
    rows = ((record["round"], row) for record in bass["rounds"] for row in record["rows"] if not row["sequence"])
    last = next(number for number, row in rows if row["start"] <= at < row["start"] + row["written"])
    expect(page.locator(".round-line")).to_contain_text(f"The lane's round {last},")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def round_with(
    final: dict[str, Any], accepts: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first round of lane "bass" that has a row for which `accepts` is true, and this row."""
    for record in final["lanes"]["bass"]["rounds"]:
        for row in record["rows"]:
            if row["drafted"] and row["written"] > row["accepted"] and accepts(row):
                return record, row
    raise AssertionError("no such round: choose another seed")


def _exports(page: Page, final: dict[str, Any]) -> None:
    """JSON and CSV contain the run."""
    run = json.loads(saved(page, "[data-take=json]"))
    assert run["settings"]["seed"] == 11 and run["settings"]["prompt"] == "Hello"
    table = list(csv.DictReader(saved(page, "[data-take=csv]").splitlines()))
    for lane in LANES:
        ours, theirs = run["lanes"][lane], final["lanes"][lane]
        assert ours["metrics"]["accepted"] == theirs["metrics"]["accepted"]
        for index, (our_sequence, their_sequence) in enumerate(
            zip(ours["sequences"], theirs["sequences"], strict=True)
        ):
            for key in ("text", "token_ids", "origins", "finish_reason"):
                assert our_sequence[key] == their_sequence[key]
            rows = [row for row in table if (row["lane"], row["sequence"]) == (lane, str(index))]
            assert [int(row["token_id"]) for row in rows] == their_sequence["token_ids"]
            assert "".join(json.loads(row["text"]) for row in rows) == their_sequence["text"]
            assert [row["origin"] for row in rows] == their_sequence["origins"]


@pytest.mark.slow
def test_a_race_that_is_stopped_at_once_is_no_error(page: Page) -> None:
    page.click("#run")
    page.click("#stop")
    page.wait_for_timeout(1000)
    expect(page.locator("#status-line .message")).to_have_text("Stopped.")
    assert page.locator("#status-line").inner_text().strip() == "Stopped."


@pytest.mark.slow
def test_stop_ends_the_race_and_keeps_and_compares_its_texts(page: Page) -> None:
    fill(page, batch=8, tokens=1024, temperature=0)
    page.click("#run")
    for lane in ("regular", "bass"):
        first = f"document.querySelector('#lane-{lane} .sequence')"
        page.wait_for_function(f"() => {first}?.textContent.length > 5")
    expect(page.locator("#run")).to_be_disabled()
    page.click("#stop")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    expect(page.locator(".message")).to_have_text("Stopped.")
    expect(page.locator("#run")).to_be_enabled()
    before = shown(page, "regular")
    assert any(before)
    assert compared(page, "bass") == [None] * 8
    assert exported(page)["comparison"]["bass"] == [None] * 8
    # The rounds are those of a race that has ended.
    line, canvas = page.locator(".step-part .step-line"), page.locator("[data-axis=bass] canvas")
    page.click("[data-switch=stepping]")
    expect(line).to_have_text(re.compile(r"Round \d+ of \d+: "))
    expect(page.locator(".verdict-exact")).not_to_contain_text("so far")
    page.uncheck("[data-drafted]")
    rounds = page.evaluate("() => Bass.roundsIn(Bass.run().lanes.get('bass').sequences[0]).length")
    page.evaluate("(n) => { for (; n; n -= 1) document.querySelector(\"[data-go='1']\").click(); }", rounds)
    expect(line).to_have_text(f"Round {rounds} of {rounds}: there is no later round.")
    page.click("[data-switch=stepping]")
    canvas.focus()
    for key in ("Home", "Enter"):
        page.keyboard.press(key)
    end = page.evaluate("() => document.querySelector('[data-axis=bass]').bars[0].end")
    assert page.evaluate("() => Bass.tape.state.ms") == end
    expect(line).to_be_visible()
    page.click("[data-switch=stepping]")
    page.evaluate(
        "() => { const [row] = Bass.run().lanes.get('bass').sequences; Bass.tape.live(); "
        "Bass.inspect('bass', 0, Bass.roundsIn(row)[0]); }"
    )
    expect(line).to_be_visible()
    page.click("[data-switch=stepping]")
    # The page itself finds the position at which a text differs.
    page.evaluate("() => { Bass.run().lanes.get('bass').sequences[2].tokens[1].id = -7; }")
    theirs = page.evaluate("() => Bass.run().lanes.get('regular').sequences[2].tokens[1].id")
    assert exported(page)["comparison"]["bass"][2] == {"at": 1, "ours": -7, "theirs": theirs}
    assert page.evaluate("() => Bass.compared().bass[2]").startswith("differs at token 2: ")
    # A race that is refused after a stopped one ends too.
    fill(page, temperature=-1)
    page.click("#run")
    expect(page.locator(".message")).to_have_attribute("data-phase", "error")
    # The device is free again: another race completes.
    fill(page, batch=1, tokens=4)
    assert shown(page, "regular") == before
    run_to_the_end(page)
    assert len(shown(page, "regular")) == 1


@pytest.mark.slow
def test_model_text_is_never_markup_and_32_rows_stay_readable(
    page: Page, server: str, hostile: tuple[str, ...]
) -> None:
    prompt = "".join(hostile)
    fill(page, prompt=prompt, batch=32, tokens=32, temperature=2)
    run_to_the_end(page)
    final = Client(server, verbose=False).submit(prompt, 32, 32, 2, 3, draft_length="3", api_name="/race").result()
    texts_are(page, final)
    written = "".join(text for lane in LANES for text in shown(page, lane))
    assert [text for text in hostile if text not in written] == []
    assert page.evaluate("() => window.pwned") is None
    # Drafts are elements without content.
    assert page.locator(".sequence :not(span):not(i[data-text]:empty)").count() == 0
    for width, least, font in ((390, 18, "13px"), (1400, 2 * 21, "14px")):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        for lane in LANES:
            # Each card shows two lines in full, on a phone one, and the list fits into the window.
            cards = page.locator(f"#lane-{lane} .window")
            sizes = cards.evaluate_all("all => all.map(e => [e.clientHeight, e.clientWidth])")
            assert len(sizes) == 32
            assert min(high for high, _ in sizes) >= least and min(wide for _, wide in sizes) >= 190
            expect(cards.last).to_have_css("font-size", font)
            listed = page.locator(f"#lane-{lane} .sequences").bounding_box()
            assert listed and listed["height"] <= 900
            cards.last.scroll_into_view_if_needed()
            # On a phone, a row shows its newest words.
            tokens = cards.last.locator(".token")
            expect(tokens.last if width == 390 else tokens.first).to_be_in_viewport()


@pytest.mark.slow
def test_a_budget_ends_each_lane_by_its_clock(page: Page) -> None:
    fill(page, batch=4, tokens=1024)
    # This budget is so short that, even on a fast machine, no lane finishes.
    fill_more(page, "time-budget-ms", "60")
    run_to_the_end(page)
    for lane in LANES:
        expect(page.locator(f"#lane-{lane} .state")).to_contain_text("of 4 within the budget")
        badges = page.eval_on_selector_all(f"#lane-{lane} .badge", "all => all.map(e => e.textContent)")
        assert "time up" in badges and set(badges) <= {"time up", "end"}
    expect(page.locator(".budget-line")).to_contain_text("finished within 60 ms of lane time: Regular")


@pytest.mark.slow
def test_a_race_works_by_keyboard_only_and_on_a_phone(page: Page) -> None:
    page.locator("#prompt textarea").focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("Hello")
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.closest('[id]')?.id ?? ''"))
        if reached[-1] == "run":
            break
        if page.evaluate("document.activeElement.closest('#max-new-tokens') !== null"):
            page.keyboard.press("ControlOrMeta+A")
            page.keyboard.type("6")
    assert reached[-1] == "run"
    page.keyboard.press("Enter")
    expect(page.locator("#lane-bass .state")).to_contain_text("Finished", timeout=60_000)
    page.locator("[data-switch=colours]").focus()
    page.keyboard.press("Space")
    expect(page.locator("[data-switch=colours]")).to_have_attribute("aria-pressed", "false")
    # On a phone the lanes scroll into view.
    expect(page.locator(".glance")).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 844})
    fill(page, tokens=40)
    run_to_the_end(page)
    expect(page.locator(".verdict-head")).to_be_in_viewport()
    expect(page.locator(".glance")).to_be_visible()
    for lane in LANES:
        for figure, place, unit in (("ms_per_token", ".glance-ms", " ms"), ("speedup", ".glance-speedup", "")):
            value = page.text_content(f"#lane-{lane} [data-figure={figure}]")
            assert value and page.text_content(f"[data-glance={lane}] {place}") == value + unit
    # The bar has the figures while the lanes are out of sight.
    page.locator(".bass-summary").scroll_into_view_if_needed()
    page.locator("[data-glance=bass]").click()
    expect(page.locator("#lane-bass h2")).to_be_in_viewport()
    expect(page.locator(".glance-run")).to_have_text("Run")
    assert_fits(page, 390)
