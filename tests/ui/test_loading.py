"""How the page gets its scripts, Plotly and the lines of a race: again after a failure, late, and all of them."""

from __future__ import annotations

import gzip

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

# Gives the log's newest part to a feed of its own, as Gradio would, and a server that knows the lines before it.
GAP = """async () => {
  const heard = [], head = JSON.stringify({ run: "gap", lanes: ["bass"], batch_size: 1, looks: {}, settings: {} });
  const line = (i) => JSON.stringify({ bass: { clock_ms: i, new: { 0: [["s", `${i} `, i, i]] }, rounds: [] } });
  const lines = Array.from({ length: 9 }, (_, i) => line(i)), asked = [];
  const props = {};
  let changed = null;
  const server = { missed: async (value) => (asked.push(value), lines.slice(value[1]).join("\\n")) };
  Bass.mountFeed("log", props, (_, call) => (changed = call), server);
  const send = async (first, end) => {
    props.value = [head, first, ...lines.slice(first, end)].join("\\n");
    changed();
    await new Promise((go) => setTimeout(go));
  };
  Bass.tell("phase", "running");
  await send(0, 2);
  await send(0, 3);
  await send(2, 4);  // begun anew, with one line that is known
  await send(7, 8);  // lines 4 to 6 never came
  await send(7, 9);
  return [Bass.run().lanes.get("bass").sequences[0].tokens.map(({ id }) => id), asked];
}"""


@pytest.fixture
def bare(context: BrowserContext) -> Page:
    return context.new_page()


def test_a_page_asks_for_the_lines_that_it_missed(page: Page) -> None:
    ids, asked = page.evaluate(GAP)
    assert ids == list(range(9)) and asked == [["gap", 4]]


def test_a_script_that_fails_once_is_fetched_again(bare: Page, server: str) -> None:
    failed: list[str] = []

    def answer(route: Route) -> None:
        if len(failed) < 2:
            failed.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    bare.route("**/bass.js*", answer)
    bare.goto(f"{server}?play=off")
    expect(bare.locator("#lane-bass .state")).to_have_text("Ready")
    bare.wait_for_function("() => window.Bass?.plots?.address")
    assert len(failed) == 2
    bare.close()


def test_a_page_without_scripts_says_so(bare: Page, server: str) -> None:
    bare.route("**/bass.js*", lambda route: route.abort())
    bare.goto(f"{server}?play=off")
    expect(bare.locator(".no-scripts")).to_contain_text("could not be loaded: check the connection")
    expect(bare.locator(".no-scripts")).to_have_count(1)
    bare.close()


def test_plotly_waits_for_a_chart_in_view(bare: Page, server: str) -> None:
    asked: list[str] = []
    bare.on("request", lambda request: asked.append(request.url))
    bare.goto(f"{server}?play=off")
    bare.wait_for_function("() => window.Bass?.plots?.address")
    assert not any("plotly" in url for url in asked)
    bare.locator("[data-chart=latency]").scroll_into_view_if_needed()
    expect(bare.locator("[data-chart=latency] .main-svg").first).to_be_visible()
    assert sum("plotly.min.js" in url for url in asked) == 1
    bare.close()


def test_text_is_sent_compressed_and_streams_are_not(server: str) -> None:
    with httpx.Client() as client:
        with client.stream("GET", f"{server}/", headers={"Accept-Encoding": "gzip"}) as answer:
            packed = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip" and len(gzip.decompress(packed)) > 3 * len(packed)
        with client.stream("GET", f"{server}/gradio_api/heartbeat/x", headers={"Accept-Encoding": "gzip"}) as beat:
            assert "content-encoding" not in beat.headers
