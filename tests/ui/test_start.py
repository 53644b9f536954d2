"""A start: whoever opens the page during it, at whatever moment, ends at the page with Run."""

from __future__ import annotations

import asyncio
import threading
import time

import gradio as gr
import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from bass_core import ModelPair
from ui.page import early
from ui.page.early import EarlyPage
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.server import PageServer, bind, starting
from ui.sources.local import race_source


@pytest.mark.slow
def test_run_is_found_by_whoever_opens_the_page_during_a_start(
    context: BrowserContext, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start as app.py does it. In each of its phases pages are opened, and plain requests come all the time."""
    monkeypatch.setattr(early, "PATIENCE_S", 0.0)
    pages: list[Page] = []
    answers: list[int] = []

    def visit(status: int | None) -> None:
        """Open two pages, and wait for a plain request that is answered with this status."""
        for _ in range(2):
            pages.append(context.new_page())
            response = pages[-1].goto(server.url, wait_until="commit")
            assert response is not None and response.status in ({200, 503} if status is None else {status})
        while status not in (None, *answers) and asking.is_alive():
            time.sleep(0.05)

    def ask() -> None:
        while not ended.wait(0.1):
            answers.append(httpx.get(server.url, headers={"Accept": "text/html"}, timeout=60).status_code)

    ended, asking = threading.Event(), threading.Thread(target=ask)
    try:
        with PageServer(bind("127.0.0.1", [0]), "127.0.0.1") as server:
            asking.start()
            visit(503)  # the imports
            with EarlyPage(lambda page: server.open(page, **launch_options())) as waiting:
                visit(None)  # while the early page is built
                waiting._timer.join()
                visit(200)
                waiting.settle()
                last = build(race_source(pair), limits=Limits(), about="here")
                opening = threading.Thread(target=server.open, args=[last], kwargs=launch_options())
                opening.start()
                visit(200)
                opening.join()
            visit(200)
            for page in pages:
                expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=60_000)
                expect(page.locator(".early")).to_have_count(0)
            ended.set()
            asking.join()
    finally:
        ended.set()
        for page in pages:
            page.close()
    # Each request was answered, none refused: by the starting page, the early one and the one with the model.
    assert set(answers) == {503, 200} and sorted(answers, reverse=True) == answers


@pytest.mark.parametrize(
    ("method", "path", "accepted", "html"),
    [
        ("GET", "/", "text/html,*/*", True),
        ("GET", "/bass/", "text/html,*/*", True),  # a proxy that keeps its prefix
        ("HEAD", "/", "text/html,*/*", True),
        ("POST", "/", "text/html,*/*", False),
        ("GET", "/gradio_api/info", "*/*", False),
    ],
)
def test_a_browser_gets_a_page_before_there_is_one(method: str, path: str, accepted: str, html: bool) -> None:
    answer = TestClient(starting).request(method, path, headers={"Accept": accepted})
    assert answer.status_code == 503 and answer.headers["Content-Type"].startswith("text/html") is html


@pytest.mark.slow
def test_open_tabs_do_not_delay_the_end() -> None:
    with PageServer(bind("127.0.0.1", [0]), "127.0.0.1") as server:
        with gr.Blocks() as page:
            pass
        server.open(page)
        with httpx.stream("GET", f"{server.url}gradio_api/heartbeat/a") as heartbeat:
            lines = heartbeat.iter_lines()
            next(lines)
            page.server.close()  # as Gradio does it after Ctrl-C
            assert not server._thread.is_alive()
            assert list(lines) == [""]


@pytest.mark.slow
def test_a_slow_machine_does_not_end_the_start(pair: ModelPair) -> None:
    """Every answer takes longer than the 3 seconds for which Gradio asks its own address once."""

    class SlowServer(PageServer):
        async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(3.5)
            await super()._answer(scope, receive, send)

    with SlowServer(bind("127.0.0.1", [0]), "127.0.0.1") as server:
        page = build(race_source(pair), limits=Limits(), about="here")
        assert server.open(page, **launch_options()) == (server.url, None)
        page.close()


@pytest.mark.slow
def test_a_page_whose_script_failed_loads_again(context: BrowserContext, server: str) -> None:
    """One of Gradio's own scripts is refused twice, as while a server is restarted."""
    page, failed = context.new_page(), list[str]()

    def answer(route: Route) -> None:
        if len(failed) < 2 and route.request.resource_type == "script":
            failed.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    page.route("**/assets/*.js", answer)
    page.goto(f"{server}?play=off")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=30_000)
    assert len(failed) == 2
    page.close()
