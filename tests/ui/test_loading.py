"""Loading of scripts, Plotly and a race's lines: after failures, late, and complete."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse
from starlette.routing import Route as Place
from starlette.testclient import TestClient

from tests.support import ROOT
from ui.page import assets

# Passes parts of a log to a separate feed, as Gradio would. The feed can fetch missing lines from a fake server.
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
  await send(2, 4);  // restarted log, with one known line
  await send(7, 8);  // lines 4 to 6 are missing
  await send(7, 9);
  return [Bass.run().lanes.get("bass").sequences[0].tokens.map(({ id }) => id), asked];
}"""


# Lines of a stopped run arrive while a recording plays and after its end.
LATE = """async () => {
  const head = (run) => JSON.stringify({ run, lanes: ["bass"], batch_size: 1, looks: {}, settings: {} });
  const line = (i) => JSON.stringify({ bass: { clock_ms: i, new: { 0: [["s", `${i} `, i, i]] }, rounds: [] } });
  const props = {}, seen = [];
  let changed = null, answer = null;
  const server = { missed: () => new Promise((resolve) => (answer = resolve)) };
  Bass.mountFeed("log", props, (_, call) => (changed = call), server);
  Bass.on("line", ({ bass }) => seen.push(bass.clock_ms));
  const send = (run, first, ...numbers) => {
    props.value = [head(run), first, ...numbers.map(line)].join("\\n");
    changed();
  };
  const turn = () => new Promise((go) => setTimeout(go));
  Bass.tell("phase", "running");
  send("late", 0, 0);
  send("late", 5, 5);  // lines 1 to 4 never came
  Bass.tell("phase", "stopped");
  Bass.tell("phase", "playing");
  Bass.tell("phase", "done");
  answer([1, 2, 3, 4].map(line).join("\\n"));
  await turn();
  send("late", 5, 5, 6);
  await turn();
  Bass.tell("phase", "running");
  send("next", 0, 10);
  return seen;
}"""
# Missed lines arrive after the end of a race whose values are held.
HELD = """async () => {
  const head = JSON.stringify({ run: "held-atOnce", lanes: ["bass"], batch_size: 1, looks: {}, settings: {} });
  const line = (i) => JSON.stringify({ bass: { clock_ms: i, new: { 0: [["s", `${i} `, i, i]] }, rounds: [] } });
  const props = {}, seen = [];
  let changed = null, answer = null;
  const server = { missed: () => new Promise((resolve) => (answer = resolve)) };
  Bass.mountFeed("log", props, (_, call) => (changed = call), server);
  Bass.tell("phase", "running");
  Bass.on("line", ({ bass }) => seen.push(bass.clock_ms));
  Bass.on("phase", (phase) => seen.push(phase));
  const send = (first, ...numbers) => {
    props.value = [head, first, ...numbers.map(line)].join("\\n");
    changed();
  };
  send(0, 0);
  Bass.player.hold(true);
  send(2, 2);
  if (atOnce) Bass.tell("phase", "done");
  else Bass.player.push("phase", "done");
  answer(line(1));
  await new Promise((go) => setTimeout(go));
  Bass.player.hold(false);
  return seen;
}"""


@pytest.fixture
def bare(context: BrowserContext) -> Page:
    return context.new_page()


def test_missed_lines_are_fetched(opened: Page) -> None:
    ids, asked = opened.evaluate(GAP)
    assert ids == list(range(9)) and asked == [["gap", 4]]


def test_late_lines_of_a_stopped_run_are_dropped(opened: Page) -> None:
    assert opened.evaluate(LATE) == [0, 10]


@pytest.mark.parametrize("at_once", ["true", "false"])
def test_the_end_is_announced_after_missed_lines_that_are_held(opened: Page, at_once: str) -> None:
    assert opened.evaluate(HELD.replace("atOnce", at_once)) == ["running", 0, "done", 1, 2, "done"]


def test_a_script_that_fails_once_is_fetched_again(bare: Page, server: str) -> None:
    failed: list[str] = []

    def answer(route: Route) -> None:
        if len(failed) < 2:
            failed.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    bare.route("**/bass-*.js*", answer)
    bare.goto(f"{server}?play=off")
    expect(bare.locator("#lane-bass .state")).to_have_text("Ready")
    bare.wait_for_function("() => window.Bass?.plots?.address")
    assert len(failed) == 2
    bare.close()


def test_a_page_without_scripts_shows_a_message(bare: Page, server: str) -> None:
    bare.route("**/bass-*.js*", lambda route: route.abort())
    bare.goto(f"{server}?play=off")
    expect(bare.locator(".no-scripts")).to_contain_text("could not be loaded: check the connection")
    expect(bare.locator(".no-scripts")).to_have_count(1)
    bare.close()


def test_plotly_is_loaded_when_a_chart_comes_into_view(bare: Page, server: str) -> None:
    asked: list[str] = []
    bare.on("request", lambda request: asked.append(request.url))
    bare.goto(f"{server}?play=off")
    bare.wait_for_function("() => window.Bass?.plots?.address")
    assert not any("plotly" in url for url in asked)
    bare.locator("[data-chart=latency]").scroll_into_view_if_needed()
    expect(bare.locator("[data-chart=latency] .main-svg").first).to_be_visible()
    assert sum("plotly.min.js" in url for url in asked) == 1
    bare.close()


def test_a_chart_shows_that_plotly_failed_until_it_is_loaded(bare: Page, server: str) -> None:
    broken = True
    errors: list[str] = []
    bare.on("pageerror", lambda error: errors.append(str(error)))
    bare.route("**/plotly.min.js*", lambda route: route.abort() if broken else route.continue_())
    bare.goto(f"{server}?play=off")
    chart = bare.locator("[data-chart=latency]")
    chart.scroll_into_view_if_needed()
    expect(chart).to_contain_text("could not be loaded")
    bare.get_by_role("tab", name="How it works").click()
    idea = bare.locator(".what-if .plot")
    idea.scroll_into_view_if_needed()
    expect(idea).to_contain_text("could not be loaded")
    broken = False
    expect(idea.locator(".main-svg").first).to_be_visible()
    expect(idea).not_to_contain_text("could not be loaded")
    bare.get_by_role("tab", name="Race").click()
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".main-svg").first).to_be_visible()
    expect(chart).not_to_contain_text("could not be loaded")
    assert not errors
    bare.close()


def test_ctrl_p_loads_plotly_before_it_prints(bare: Page, server: str) -> None:
    bare.add_init_script("window.print = () => (window.printed = Boolean(window.Plotly))")
    bare.goto(f"{server}?play=off")
    bare.wait_for_function("() => window.Bass?.plots?.address")
    bare.keyboard.press("Control+p")
    bare.wait_for_function("() => window.printed === true")
    bare.close()


def test_the_bundle_of_scripts_is_cached_and_repaired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_bundle = assets.bundle.__wrapped__
    path, (part,) = make_bundle(), (tmp_path / "bass" / "page").iterdir()
    assert path == part and path == make_bundle()
    path.write_text("damaged")
    assert make_bundle() == path and path.stat().st_size > 100_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # not a folder
    other = make_bundle()
    assert not other.is_relative_to(tmp_path) and other.read_bytes() == path.read_bytes()


def test_old_bundles_are_deleted_unless_a_process_holds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "bass" / "page"
    folder.mkdir(parents=True)
    old, held, recent, part = (folder / f"bass-{name}" for name in ("1.js", "2.js", "3.js", "4.77"))
    unrelated = folder / "notes.txt"
    for path in (old, held, recent, part, unrelated):
        path.write_text("old")
        os.utime(path, (0, 0))
    os.utime(recent)
    hold = "import sys; from pathlib import Path; from ui.page import assets; assets._hold(Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{hold}; print(flush=True); input()", str(held)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdin
        server.stdout.readline()
        os.utime(held, (0, 0))
        bundle = assets.bundle.__wrapped__()
        assert set(folder.iterdir()) == {held, recent, unrelated, bundle}
        server.stdin.close()
    os.utime(bundle, (0, 0))
    assert assets.bundle.__wrapped__() == bundle
    assert set(folder.iterdir()) == {recent, unrelated, bundle}
    assert time.time() - bundle.stat().st_mtime < 60


def test_text_is_compressed_and_each_file_only_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = b"let x = 1;\n" * 500
    for name in ("a.js", "a.png", "a.json.xz"):
        (tmp_path / name).write_bytes(content)

    async def stream(_: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        return StreamingResponse(pieces(), media_type="text/plain")

    async def file(request: Request) -> FileResponse:
        return FileResponse(tmp_path / request.path_params["name"])

    times: list[int] = []
    compress = gzip.compress
    monkeypatch.setattr(assets.gzip, "compress", lambda *arguments: times.append(1) or compress(*arguments))
    routes = [Place("/stream", stream), Place("/{name}", file)]
    client = TestClient(Starlette(routes=routes, middleware=[Middleware(assets.Compressed)]))

    def coding(name: str, **headers: str) -> str | None:
        answer = client.get(f"/{name}", headers=headers)
        assert answer.content in (content, content[:10])
        return answer.headers.get("content-encoding")

    names = ("a.js", "a.js", "a.png", "a.json.xz", "stream")
    assert [coding(name) for name in names] == ["gzip", "gzip", None, None, None]
    assert coding("a.js", **{"accept-encoding": "identity"}) is None
    assert coding("a.js", range="bytes=0-9") is None
    assert len(times) == 1


def test_each_message_of_a_stream_is_compressed_and_sent_at_once() -> None:
    messages = [f"data: {number} {'word ' * 200}\n\n".encode() for number in range(3)]
    sent: list[Any] = []

    async def pieces() -> AsyncIterator[bytes]:
        for number, message in enumerate(messages):
            yield message
            bodies = [part["body"] for part in sent if part["type"] == "http.response.body"]
            assert zlib.decompressobj(wbits=31).decompress(b"".join(bodies)) == b"".join(messages[: number + 1])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    headers = [(b"accept-encoding", b"gzip")]
    scope = {"type": "http", "method": "GET", "path": "/queue/data", "headers": headers}
    answer = StreamingResponse(pieces(), media_type="text/event-stream")
    # Playwright runs an event loop in this thread.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, assets.Compressed(answer)(scope, receive, send)).result()
    assert dict(sent[0]["headers"])[b"content-encoding"] == b"gzip"
    packed = b"".join(part["body"] for part in sent[1:])
    assert gzip.decompress(packed) == b"".join(messages) and len(packed) < 0.2 * len(b"".join(messages))


def test_the_page_is_sent_compressed(server: str) -> None:
    with httpx.Client() as client:
        with client.stream("GET", f"{server}/", headers={"Accept-Encoding": "gzip"}) as answer:
            packed = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip" and len(gzip.decompress(packed)) > 3 * len(packed)
