"""The first screen: its contents at all sizes, its opening recording, and its stable layout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair
from ui.page import early
from ui.page.early import EarlyPage, Tee
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.server import PageServer, bind
from ui.sources.local import race_source
from ui.sweep import measure

from .browser import LANES, PATIENCE_MS, assert_accessible, revealed, run_to_the_end
from .conftest import watched, watching

WIDE = ((1536, 864), (1400, 900), (1280, 720), (1024, 768))
PHONE = (390, 844)
# Lower edges of the parts of the first screen.
EDGES = """() => Object.fromEntries(["#prompt", "#batch-size", "#presets", "#run", "#stop", ".verdict",
  "#lane-regular .sequences", "#lane-speculative .sequences", "#lane-bass .sequences"].map((at) =>
  [at, document.querySelector(at).getBoundingClientRect().bottom + scrollY]))"""
# All sizes at which nothing may be cut off.
SIZES = ((390, 844), (360, 740), (768, 1024), (1024, 768), (1280, 720), (1400, 900))
# The most words of the first screen at a size: in the opening, and after it. A long prompt, of which one line is
# shown, does not count.
WORDS = {(1400, 900): (250, 300), PHONE: (120, 180)}
# Texts outside the window or cut off by a box, and parts outside their boxes. Left out: boxes that scroll
# sideways, the lanes' texts, the prompt's line, also in presenter mode, and copies of the tabs' names that Gradio
# measures but never shows.
CUT = """() => {
  const found = new Set(), shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !shown(parent)) continue;
    if (parent.closest("script, style, svg, .spoken, .visually-hidden, .window, .present-prompt, .asked"))
      continue;
    range.selectNodeContents(node);
    for (const { left, right, width } of range.getClientRects()) {
      for (let box = parent; width && box; box = box.parentElement) {
        const { position, overflowX } = getComputedStyle(box), edge = box.getBoundingClientRect();
        if (/auto|scroll/.test(overflowX) || position === "fixed") break;
        const cuts = box === document.documentElement || /hidden|clip/.test(overflowX);
        if (cuts && (right > Math.min(innerWidth, edge.right) + 1 || left < Math.max(0, edge.left) - 1)) {
          found.add(`${parent.className || parent.tagName}: ${node.data.trim().slice(0, 40)}`);
          break;
        }
      }
    }
  }
  const BOXES = {
    ".legend > li": ".toolbar", ".race-note": ".toolbar", ".axis-play > *": ".axis-play", ".axis-flag": ".axis",
    ".axis-name > *": ".axis", ".figures > div": ".lane", ".state-row > *": ".lane", ".lane h2": ".lane",
    ".opening > *": ".verdict", ".verdict-more": ".verdict", ".present-bar > *": ".present-bar",
    ".switches > *": ".bass-lanes", ".cache-row > *": ".cache-row", ".take > *": ".take",
    "#buttons > *": "#workspace",
    ".glance-lane > *": ".glance-lane", ".glance > *": ".glance", ".bass-header > *": ".bass-header",
    ".step-part > *": ".step-part", "#presets > *": "#presets",
  };
  for (const [part, box] of Object.entries(BOXES)) {
    for (const element of document.querySelectorAll(part)) {
      const own = element.getBoundingClientRect(), outer = element.closest(box).getBoundingClientRect();
      if (!own.width || !shown(element)) continue;
      const leaves = own.right > outer.right + 1 || own.left < outer.left - 1 || own.bottom > outer.bottom + 1;
      if (leaves) found.add(`${part} leaves ${box}`);
    }
  }
  return { sideways: document.documentElement.scrollWidth - innerWidth, cut: [...found] };
}"""
# The words on the screen, without the lanes' texts and without what only screen readers get.
COUNT = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  const words = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (parent.closest("script, style, svg, .spoken, .sequence, .asked, [aria-hidden=true] button")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    range.selectNodeContents(node);
    const { width, top, bottom } = range.getBoundingClientRect();
    if (!width || top >= innerHeight || bottom <= 0) continue;
    words.push(...node.data.trim().split(/\\s+/).filter(Boolean));
  }
  return words.length;
}"""
# How far the playhead's track is from the lanes' tracks, left and right, and which lanes' names cover other texts.
AXIS = """() => {
  const [over, track] = [".axis-over", ".axis-track"].map((at) =>
    document.querySelector(at).getBoundingClientRect());
  const range = document.createRange(), textOf = (element) => {
    range.selectNodeContents(element);
    return range.getBoundingClientRect();
  };
  const covers = [...document.querySelectorAll(".axis-lane")].filter((lane) => {
    const [name, read] = [".axis-name b", ".axis-read"].map((at) => textOf(lane.querySelector(at)));
    return name.right > read.left && name.bottom - 2 > read.top;
  });
  const aside = [over.left - track.left, over.right - track.right].map(Math.round);
  return { aside, covers: covers.map((lane) => lane.dataset.axis) };
}"""
FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true), 60)))"
SHIFTS = """() => {
  window.shifts = [];
  const told = ({ node, previousRect, currentRect }) =>
    `${node?.className || node?.nodeName} ${previousRect.y}->${currentRect.y}`;
  new PerformanceObserver((list) => list.getEntries().forEach(({ value, sources }) =>
    window.shifts.push([value, ...sources.map(told)]))).observe({ type: "layout-shift" });
}"""
# The part that has the focus: the form, the race, or neither.
STOP = "() => document.activeElement.closest('#settings, .bass-lanes')?.className"
PLAYED = "() => window.Bass?.tape?.state.recorded && Bass.run()?.done"


def test_the_screen_fits_a_race_plays_a_recording_and_does_not_shift(context: BrowserContext, server: str) -> None:
    with watching(context, server) as watch:
        page = watch.page
        page.goto(server)
        page.wait_for_function("() => window.Bass?.tape?.state.recorded && Bass.tape.state.playing")
        expect(page.locator(".race-note")).to_have_text("Recorded on two cores of a Xeon with AMX.")
        # Escape closes the list of keys, and not the opening as well.
        page.click("[data-present]")
        page.keyboard.press("?")
        expect(page.locator("#keys-title")).to_be_in_viewport(ratio=1)
        page.keyboard.press("Escape")
        expect(page.locator("dialog.keys")).to_be_hidden()
        expect(page.locator(".opening")).to_be_visible()
        page.click("[data-present]")
        page.click("[data-skip]")
        page.wait_for_function(PLAYED)
        revealed(page)
        expect(page.locator(".verdict-head")).to_contain_text("BASS was fastest")
        _above_the_fold(page)
        _presented(page)
        assert_accessible(page)
        page.evaluate(SHIFTS)
        expect(page.locator(".bass-summary")).to_be_visible()
        run_to_the_end(page)
        assert not page.evaluate("() => Bass.tape.state.recorded")
        shifts = page.evaluate("() => window.shifts")
        assert sum(shift[0] for shift in shifts) <= 0.05, "\n".join(map(str, shifts))
        # The focused prompt field grows and covers Run, but one click on Run still starts a race.
        page.locator("#prompt textarea").focus()
        page.click("#run")
        expect(page.locator("#status-line .message")).not_to_have_attribute("data-phase", "done")


def test_no_verdict_or_sentence_moves_the_lanes_of_a_phone(film: Page) -> None:
    film.set_viewport_size({"width": 390, "height": 844})
    film.wait_for_function(FRAME)
    tops = film.evaluate(
        """(texts) => texts.map(([head, said]) => {
      document.querySelector(".verdict-head").textContent = head;
      document.querySelector(".said").textContent = said;
      return document.querySelector(".lane-grid").getBoundingClientRect().top;
    })""",
        [
            ["BASS was fastest: 2.8 times as fast as Regular.", "Same text, 2.8 times as fast."],
            [
                "BASS and Speculative were level, ahead of Regular: the difference of 13 % may be chance.",
                "The question is read. Three decoders of one model begin to answer.",
            ],
        ],
    )
    assert tops[0] == tops[1]


def test_charts_in_view_wait_for_the_end_of_the_opening(context: BrowserContext, shelf: str) -> None:
    with watching(context, shelf) as watch:
        page = watch.page
        page.goto(shelf)
        page.wait_for_function("() => window.Bass?.plots?.address && Bass.tape.state.playing")
        page.locator("[data-chart=race]").scroll_into_view_if_needed()
        expect(page.get_by_text("The charts are drawn once the opening or the race has ended.")).to_be_visible()
        # The opening waits out of sight too.
        page.wait_for_function("() => !Bass.tape.state.playing")
        assert page.locator("script[src*=plotly]").count() == 0
        page.get_by_role("button", name="Draw them now").click()
        page.wait_for_function("() => window.Plotly && document.querySelector('[data-chart] .main-svg')")
        expect(page.locator(".opening")).to_be_hidden()


def _above_the_fold(page: Page) -> None:
    for width, height in WIDE:
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function("() => new Promise((done) => requestAnimationFrame(() => done(true)))")
        edges = page.evaluate(EDGES)
        assert {at: edge for at, edge in edges.items() if edge > height} == {}, (width, height)
    page.set_viewport_size({"width": 1400, "height": 900})


def _presented(page: Page) -> None:
    """In presenter mode, four rows of each lane and the switches fit on the screen too."""
    page.click("[data-present]")
    for width, height in WIDE[:3]:
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function("() => new Promise((done) => requestAnimationFrame(() => done(true)))")
        edges = page.evaluate(EDGES)
        assert all(edges[f"#lane-{lane} .sequences"] <= height for lane in LANES), (width, height, edges)
        expect(page.locator(".switches")).to_be_in_viewport(ratio=1)
    page.click("[data-present]")


@pytest.fixture(scope="module")
def ended(context: BrowserContext, server: str) -> Iterator[Page]:
    """A page that shows the end of the opening's recording."""
    with watched(context, server) as page:
        page.click("[data-recording=win]")
        page.wait_for_function("() => Bass.run() && Bass.tape.state.playing")
        page.evaluate("() => Bass.tape.live()")
        revealed(page)
        yield page


@pytest.mark.slow
@pytest.mark.parametrize("presents", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_off_at_any_size(ended: Page, size: tuple[int, int], presents: bool) -> None:
    ended.set_viewport_size({"width": size[0], "height": size[1]})
    if ended.evaluate("() => document.body.classList.contains('presenting')") != presents:
        ended.click("[data-present]")
    for stepping in (False, True):
        if stepping:
            ended.evaluate("() => document.querySelector('[data-switch=stepping]').click()")
        ended.evaluate("() => scrollTo(0, 0)")
        ended.wait_for_function(FRAME)
        assert ended.evaluate(CUT) == {"sideways": 0, "cut": []}, stepping
        assert ended.evaluate(AXIS) == {"aside": [0, 0], "covers": []}, stepping
    ended.evaluate("() => document.querySelector('[data-switch=stepping]').click()")


@pytest.mark.slow
def test_a_phone_shows_the_race_first_and_run(context: BrowserContext, server: str) -> None:
    with watching(context, server) as watch:
        page = watch.page
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        page.goto(server)
        page.wait_for_function("() => document.querySelector('#lane-regular .token') && Bass.tape.state.playing")
        bar, run = page.locator(".glance"), page.locator(".glance-run")
        expect(run).to_have_text("Run")
        expect(page.locator(".said")).to_be_in_viewport(ratio=1)
        page.wait_for_function("() => Bass.run().head.batch_size === 4")
        for part in (".axis-lanes", *(f"#lane-{lane} .card:last-child" for lane in LANES)):
            box, below = page.locator(part).first.bounding_box(), bar.bounding_box()
            assert box and below and box["y"] > 0 and box["y"] + box["height"] <= below["y"] + 1, part
        # Once the page is laid out, the Tab key goes from the tabs to the race, and then to the form.
        for _ in range(20):
            page.locator("#tabs [role=tab]:visible").last.focus()
            stops = []
            for _ in range(4):
                page.keyboard.press("Tab")
                stops.append(page.evaluate(STOP))
            if (next(filter(None, stops), None) or "").startswith("bass-lanes"):
                break
            page.wait_for_timeout(500)
        else:
            pytest.fail(f"the race doesn't follow the tabs: {stops}")
        lanes, form = page.locator(".bass-lanes").bounding_box(), page.locator("#prompt").bounding_box()
        assert lanes and form and lanes["y"] + lanes["height"] <= form["y"]
        # While the form's own button is in sight, there is no other one.
        page.locator("#run").scroll_into_view_if_needed()
        expect(run).to_be_hidden()
        page.evaluate("() => scrollTo(0, 0)")
        run.click()
        page.wait_for_function("() => Bass.run() && !Bass.tape.state.recorded")
        expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done", timeout=PATIENCE_MS)
        expect(run).to_have_text("Run")
        # Screen readers get the lanes' states, which are not in sight.
        for lane in LANES:
            expect(page.locator(f"#lane-{lane}").get_by_role("status")).to_have_text("Finished")
        # A tap on a bar shows its round. The race can go on from there.
        page.locator("[data-axis=bass] canvas").click(position={"x": 8, "y": 20})
        expect(page.locator(".step-part")).to_be_visible()
        page.locator("[data-tape=play]").click()
        expect(page.locator(".step-part")).to_be_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("size", WORDS)
def test_the_first_screen_has_few_words(context: BrowserContext, server: str, size: tuple[int, int]) -> None:
    with watching(context, server) as watch:
        page = watch.page
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.goto(server)
        page.wait_for_function("() => Bass.run() && Bass.tape.state.playing && Bass.tape.state.ms > 20")
        opening = page.evaluate(COUNT)
        page.click("[data-skip]")
        page.wait_for_function(PLAYED)
        revealed(page)
        counts, most = (opening, page.evaluate(COUNT)), WORDS[size]
        assert counts[0] <= most[0] and counts[1] <= most[1], counts


@pytest.mark.slow
def test_with_reduced_motion_the_recording_shows_only_its_end(context: BrowserContext, server: str) -> None:
    with watching(context, server) as watch:
        page = watch.page
        page.emulate_media(reduced_motion="reduce")
        page.goto(server)
        page.wait_for_function(PLAYED)
        assert not page.evaluate("() => Bass.tape.state.playing")
        assert all(page.locator(f"#lane-{lane} .sequence").count() == 4 for lane in LANES)


@pytest.fixture
def door() -> Iterator[PageServer]:
    with PageServer(bind("127.0.0.1", [0]), "127.0.0.1") as server:
        yield server


def opened(server: PageServer) -> Callable[[gr.Blocks], tuple[str, str | None]]:
    return lambda page: server.open(page, **launch_options())


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_api_answers_while_the_model_loads(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, door: PageServer, fails: bool
) -> None:
    monkeypatch.setattr(early, "PATIENCE_S", 0.0)
    monkeypatch.setattr(early, "UPDATE_S", 0.1)
    monkeypatch.setattr(measure, "SHOW_SECONDS", 0.0)
    page, address = EarlyPage(opened(door), limits=Limits(max_batch=40)), door.url
    later = build(race_source(pair), limits=Limits(), about="here")
    with suppress(KeyError), page:
        page._timer.join()
        client = Client(address, verbose=False)
        race, other = (client.submit("Hello", 40, 8, api_name="/race") for _ in range(2))
        sweep = client.submit("Hello", batches=[40], api_name="/sweep")
        (refusal,) = client.submit("Hello", 41, api_name="/race")
        assert refusal["error"] == "Batch size must be a whole number from 1 to 40."
        until = time.monotonic() + 20
        while min(len(job.outputs()) for job in (race, other, sweep)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        if fails:
            raise KeyError
        opened(door)(later)
    outcome = early.FAILED if fails else early.READY
    for job in (race, other, sweep):
        with pytest.raises(AppError, match=outcome):
            job.result(20)
        *states, last = job
        assert last["done"] and last["error"] == outcome and not any(state["done"] for state in states)
        assert len(states) >= 3
        if job is sweep:
            assert states[-1]["progress"]["now"] == "the model is being loaded"
        else:
            assert last["lanes"] == {}
            assert all((state["phase"], state["lanes"]) == ("starting", {}) for state in states)
            times = [state["elapsed_ms"] for state in states]
            assert times == sorted(times) and times[-1] > 0
    if not fails:
        assert Client(address, verbose=False).submit("Hello", 1, 4, 0, api_name="/race").result()["lanes"]


@pytest.mark.slow
def test_the_page_plays_a_recording_while_the_model_loads(
    context: BrowserContext, pair: ModelPair, monkeypatch: pytest.MonkeyPatch, door: PageServer
) -> None:
    monkeypatch.setattr(early, "PATIENCE_S", 0.0)
    later = build(race_source(pair), limits=Limits(), about="here")
    first = context.new_page()
    first.goto(door.url)
    expect(first.get_by_role("status")).to_contain_text("BASS is starting")
    with EarlyPage(opened(door), name="owner/a & b") as waiting:
        waiting._timer.join()
        first.wait_for_function(PLAYED)
        page = context.new_page()
        page.goto(door.url)
        page.wait_for_function(PLAYED)
        print("Compiling the kernels: 7 functions [00:01, 7.00 functions/s]", file=sys.stderr)
        print("A file at /some/where", file=sys.stderr)
        expect(page.locator(".early")).to_contain_text("The pair owner/a & b is being prepared. Races can start")
        expect(page.locator(".about-pair")).to_have_text("owner/a & b")
        expect(page.locator(".early")).to_contain_text("Compiling the kernels: 7 functions")
        expect(page.locator(".early")).not_to_contain_text("/some/where")
        opened(door)(later)
    for each in (first, page):
        expect(each.locator("#prompt textarea")).to_be_visible()
        expect(each.locator(".early")).to_have_count(0)
        each.close()


@pytest.mark.parametrize(
    ("line", "words", "share"),
    [
        ("Downloading SmolLM2-135M:  43%|####      | 40.0M/93.0M [00:01<00:02, 20MB/s]", "43 %", "0.43"),
        ("Compiling, once:  50%|#####     | 112/226 [00:09<00:10, 9.1 functions/s]", "112 of 226", "0.5"),
        ("\rCompiling the CPU's kernels, once: 57 functions [00:09,  3.80 functions/s]", "57 functions", "null"),
        ("/a/path: 3 warnings were printed\n", "", "null"),
    ],
)
def test_progress_in_the_terminal_is_shown_on_the_page(line: str, words: str, share: str) -> None:
    written: list[str] = []
    stream: Callable[[str], object] = written.append
    tee = Tee(type("Stream", (), {"write": lambda _, text: stream(text) or len(text)})())
    tee.write(line)
    assert written == [line]
    assert f'{words}", "share": {share}}}' in tee.progress()
