"""A full race on the page equals the API's and is rendered often; an idle page requests no frames."""

from __future__ import annotations

from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import CDPSession, Page, expect

from ..browser import LANES, fill, open_page, run_to_the_end, shown

# Counts the frames in which some text has grown since the previous frame.
WATCH_FRAMES = """() => {
  const seen = window.seen = { frames: 0, changed: false };
  new MutationObserver(() => { seen.changed = true; })
    .observe(document.querySelector(".lane-grid"), { childList: true, subtree: true });
  const frame = () => {
    if (seen.changed) { seen.frames += 1; seen.changed = false; }
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""
# True once every visible figure has been drawn and the page is idle.
AT_REST = """() => [...document.querySelectorAll("[data-chart] .plot, .bass-summary .plot")].every((plot) => {
  const { top, bottom } = plot.getBoundingClientRect();
  return plot.data?.length || plot.emptyAs?.startsWith("n/a") || bottom < 0 || top > innerHeight;
}) && new Promise((resolve) => requestIdleCallback(() => resolve(true)))"""
# Records the pause in ms before each drawing of a chart, whether the race was over, and whether the race chart
# had no lines yet.
WATCH_PAUSES = """(() => {
  const pauses = window.pauses = [], later = window.setTimeout;
  window.setTimeout = (callback, ms, ...rest) => {
    if (!String(callback).includes("this.paint(")) return later(callback, ms, ...rest);
    const over = document.querySelector("#status-line .message").dataset.phase === "done";
    const empty = !document.querySelector("[data-chart=race] .plot").data?.length;
    return later(() => { pauses.push({ ms, over, empty }); callback(); }, ms, ...rest);
  };
})()"""


def trace(cdp: CDPSession) -> None:
    """Start recording the browser's trace events."""
    categories = ["disabled-by-default-devtools.timeline", "devtools.timeline", "toplevel"]
    cdp.send("Tracing.start", {"traceConfig": {"includedCategories": categories}})


def traced(cdp: CDPSession) -> list[dict[str, Any]]:
    """The trace events since `trace` on all main threads, including that of the page's renderer."""
    events: list[dict[str, Any]] = []
    cdp.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    done: list[bool] = []
    cdp.on("Tracing.tracingComplete", lambda _: done.append(True))
    cdp.send("Tracing.end")
    while not done:
        cdp.send("Runtime.evaluate", {"expression": "1"})
    mains = {(e["pid"], e["tid"]) for e in events if e.get("args", {}).get("name") == "CrRendererMain"}
    return [e for e in events if (e["pid"], e["tid"]) in mains]


def test_an_idle_page_asks_for_no_frames(page: Page) -> None:
    cdp = page.context.new_cdp_session(page)
    frames = [True]
    # While it loads, Gradio requests frames for some seconds.
    for _ in range(15):
        trace(cdp)
        page.wait_for_timeout(1000)
        frames = [True for event in traced(cdp) if event["name"] == "FireAnimationFrame"]
        if not frames:
            break
    assert not frames, "Gradio's timers are to ask for none: ui/static/page/timers.js"


def test_the_charts_of_a_first_race_do_not_wait_for_each_other(page: Page, server: str) -> None:
    page.add_init_script(WATCH_PAUSES)
    open_page(page, server)
    fill(page, batch=4, tokens=100, seed=20)
    # The Run button stays in view.
    page.locator("[data-chart=race]").scroll_into_view_if_needed()
    run_to_the_end(page)
    page.wait_for_function(AT_REST)
    pauses = page.evaluate("pauses")
    assert max(pause["ms"] for pause in pauses if pause["empty"]) <= 300
    assert all(pause["ms"] == 0 for pause in pauses if pause["over"])


@pytest.mark.slow
def test_three_lanes_of_eight_sequences_of_128_tokens(page: Page, server: str) -> None:
    # A first race draws every chart and the summary once, so that the next one measures the race alone.
    fill(page, batch=2, tokens=8, seed=20)
    run_to_the_end(page)
    expect(page.locator(".bass-summary .main-svg").first).to_be_visible()
    page.wait_for_function(AT_REST)
    fill(page, batch=8, tokens=128, seed=21)
    page.evaluate(WATCH_FRAMES)
    run_to_the_end(page)
    # The texts grew during the race. `python -m bench page` measures frames per second and the longest task.
    assert page.evaluate("() => window.seen.frames") > 10
    final = Client(server, verbose=False).submit("Hello", 8, 128, 0.9, 21, api_name="/race").result()
    for lane in LANES:
        assert shown(page, lane) == [sequence["text"] for sequence in final["lanes"][lane]["sequences"]]
        assert sum(len(s["token_ids"]) for s in final["lanes"][lane]["sequences"]) > 500
