"""A long race of four lanes: what the page keeps in memory, and what it receives for each token."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .browser import LANES, fill, open_settings

pytestmark = pytest.mark.slow
BATCH, TOKENS = 16, 1024
MOST_BYTES, MOST_BYTES_PER_TOKEN = 150e6, 1000
WRITTEN = """() => [...Bass.run().lanes.values()].flatMap(({ sequences }) => sequences)
  .reduce((sum, { tokens }) => sum + tokens.length, 0)"""
# Collects the durations in ms of all tasks over 50 ms from now on.
WATCH = """() => {
  window.longTasks = [];
  new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask" });
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
    done = re.compile("done|error")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", done, timeout=1_200_000)
    for lane in (*LANES, "amusd"):
        expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    heap: dict[str, Any] = session.send("Runtime.getHeapUsage")
    written = page.evaluate(WRITTEN)
    # Durations depend on the other work of the machine, so they are printed only.
    slow = sorted(task for task in page.evaluate("() => window.longTasks") if task > 100)
    per_token = sum(received) / written
    print(f"{written} tokens, {heap['usedSize'] / 1e6:.1f} MB of heap, {per_token:.0f} bytes per token")
    print(f"{len(slow)} tasks over 100 ms, the longest {max(slow, default=0):.0f} ms")
    assert written > BATCH * TOKENS, "the texts ended too early to test anything"
    assert heap["usedSize"] < MOST_BYTES
    assert per_token < MOST_BYTES_PER_TOKEN
