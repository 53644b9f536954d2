"""A long race of four lanes: the page's memory, the bytes per token, and the work of an update.

BASS_LONG_TOKENS sets the tokens per row. The bars hold for 1024, which takes three minutes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .browser import LANES, fill, open_settings

pytestmark = pytest.mark.slow
BATCH, TOKENS = 16, int(os.environ.get("BASS_LONG_TOKENS", 160))
MOST_BYTES, MOST_BYTES_PER_TOKEN = 50e6 + 100e6 * TOKENS / 1024, 1000
# A bar has two rectangles. All are drawn again when the scale of the axis changes, about ten times in a race.
MOST_BARS_PER_ROUND = 20
# NEWEST_OF_MANY * PART in ui/static/race/lanes.js.
MOST_TOKENS_SHOWN = 128
WRITTEN = """() => [...Bass.run().lanes.values()].flatMap(({ sequences }) => sequences)
  .reduce((sum, { tokens }) => sum + tokens.length, 0)"""
ROUNDS = "() => [...Bass.run().lanes.values()].reduce((sum, { rounds }) => sum + rounds.length, 0)"
# Counts the work on the page from now on: nodes that the texts get, and bars that the axis draws. Also collects
# the durations in ms of all tasks over 50 ms.
WATCH = """() => {
  const seen = window.seen = { nodes: 0, bars: 0, shown: 0, tasks: [], ended: false };
  new MutationObserver((changes) => {
    const ofTexts = changes.filter(({ target }) => target.closest(".sequence"));
    for (const { addedNodes } of ofTexts) seen.nodes += addedNodes.length;
  }).observe(document.querySelector(".lane-grid"), { childList: true, subtree: true });
  const { fillRect } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) {
    if (this.canvas.closest(".axis")) seen.bars += 1;
    return fillRect.apply(this, box);
  };
  new PerformanceObserver((list) => seen.tasks.push(...list.getEntries().map(({ duration }) => duration)))
    .observe({ type: "longtask" });
  Bass.on("phase", (phase) => (seen.ended ||= Bass.over(phase)));
}"""
# Whether the race has ended. Until then, keeps the largest number of tokens that the browser has to lay out.
# Playwright's expect would list all elements of the page each time it looks, in a long task.
ENDED = """() => {
  const { seen } = window, count = (selector) => document.querySelectorAll(selector).length;
  const shown = count(".sequence .token") - count(".folded .older .token");
  if (!seen.ended) seen.shown = Math.max(seen.shown, shown);
  return seen.ended;
}"""


def test_a_long_race_takes_little_memory_and_few_bytes_per_token(page: Page) -> None:
    open_settings(page)
    page.get_by_role("checkbox", name="AMUSD").check()
    fill(page, batch=BATCH, tokens=TOKENS)
    session, received = page.context.new_cdp_session(page), list[int]()
    session.send("Network.enable")
    session.on("Network.dataReceived", lambda event: received.append(event["encodedDataLength"]))
    page.evaluate(WATCH)
    page.click("#run")
    page.wait_for_function(ENDED, polling=1000, timeout=1_200_000)
    # Then the page shows whole texts and all charts.
    page.wait_for_function("() => !document.querySelector('.folded')", polling=1000)
    seen = page.evaluate("() => window.seen")
    for lane in (*LANES, "amusd"):
        expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    heap: dict[str, Any] = session.send("Runtime.getHeapUsage")
    written = page.evaluate(WRITTEN)
    rounds = page.evaluate(ROUNDS)
    # Durations depend on the other work of the machine, so they are printed only.
    slow = [task for task in seen["tasks"] if task > 100]
    per_token = sum(received) / written
    print(f"{written} tokens, {heap['usedSize'] / 1e6:.1f} MB of heap, {per_token:.0f} bytes per token")
    print(f"{len(slow)} tasks over 100 ms, the longest {max(slow, default=0):.0f} ms")
    print(f"{seen['nodes']} nodes, {seen['bars']} bars for {rounds} rounds, {seen['shown']} tokens laid out")
    assert written > BATCH * TOKENS, "the texts ended too early to test anything"
    assert heap["usedSize"] < MOST_BYTES
    assert per_token < MOST_BYTES_PER_TOKEN
    assert seen["nodes"] < 1.2 * written, "a token is added once"
    assert seen["bars"] < MOST_BARS_PER_ROUND * rounds, "an update draws the new bars only"
    assert seen["shown"] <= MOST_TOKENS_SHOWN * BATCH * 4, "older tokens are not laid out"
