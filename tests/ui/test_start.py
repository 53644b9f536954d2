"""A start: whoever opens the page during it, at whatever moment, ends at the page with Run."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from playwright.sync_api import BrowserContext, Route, expect
from starlette.types import Receive, Scope, Send

from bass_core import ModelPair
from ui.page import early
from ui.page.early import EarlyPage
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.server import PageServer, bind
from ui.sources.local import race_source

PAUSE_S = 1.0


def start(server: PageServer, pair: ModelPair) -> None:
    """Start as app.py does: imports, the preparation with the early page, the page with the model."""
    time.sleep(PAUSE_S)
    with EarlyPage(lambda page: server.open(page, **launch_options())) as waiting:
        time.sleep(PAUSE_S)
        waiting.settle()
        server.open(build(race_source(pair), limits=Limits(), about="here"), **launch_options())


@pytest.mark.slow
def test_run_is_found_by_whoever_opens_the_page_during_a_start(
    context: BrowserContext, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain requests come every tenth of a second, and so do pages, as far as the browser keeps up."""
    monkeypatch.setattr(early, "PATIENCE_S", 0.0)
    answers: list[int] = []
    with PageServer(bind("127.0.0.1", [0]), "127.0.0.1") as server:
        starting = threading.Thread(target=start, args=[server, pair])
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(0.1):
                answers.append(httpx.get(server.url, headers={"Accept": "text/html"}, timeout=60).status_code)

        asking = threading.Thread(target=ask)
        starting.start()
        asking.start()
        pages = []
        try:
            while starting.is_alive() and len(pages) < 12:
                pages.append(context.new_page())
                pages[-1].goto(server.url, wait_until="commit")
                time.sleep(0.1)
            starting.join()
            pages.append(context.new_page())
            pages[-1].goto(server.url)
            for page in pages:
                expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=60_000)
                expect(page.locator(".early")).to_have_count(0)
        finally:
            starting.join()
            ended.set()
            asking.join()
            for page in pages:
                page.close()
    # Each request was answered, none refused: by the starting page, the early one and the one with the model.
    assert len(answers) > 10 and set(answers) == {503, 200} and sorted(answers, reverse=True) == answers
    assert len(pages) > 3


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
