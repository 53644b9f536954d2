"""Workarounds for Gradio's idle load: its timers' frames in the browser, its queue's polling in the server."""

from __future__ import annotations

from collections.abc import Generator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ui.page.assets import FIRST, FirstScript, first, url
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build
from ui.page.request import RaceRequest

PAGE = "<!doctype html><html><head><title>t</title></head><body>ä</body></html>"


def answers(response: Response) -> TestClient:
    """A client of a server with the middleware that always answers with `response`."""
    return TestClient(
        Starlette(routes=[Route("/", lambda request: response)], middleware=[Middleware(FirstScript)])
    )


def test_a_page_gets_the_script_before_every_other_and_its_true_length() -> None:
    answer = answers(HTMLResponse(PAGE)).get("/")
    assert first().startswith(f'<script src="{url(FIRST)}"></script>')
    assert answer.text == PAGE.replace("<head>", f"<head>{first()}")
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_page_in_parts_is_put_together() -> None:
    parts = iter([PAGE[:20].encode(), PAGE[20:].encode()])
    assert "timers.js" in answers(StreamingResponse(parts, media_type="text/html")).get("/").text


def test_everything_else_passes_as_it_is() -> None:
    events = [b"data: <head>\n\n", b"data: 2\n\n"]
    streamed = answers(StreamingResponse(iter(events), media_type="text/event-stream")).get("/")
    assert streamed.content == b"".join(events)
    assert answers(JSONResponse({"a": "<head>"})).get("/").json() == {"a": "<head>"}


def test_gradio_s_queue_does_not_poll_every_millisecond() -> None:
    def none(request: RaceRequest) -> Generator[Snapshot, None, None]:
        yield from ()

    queue = build(none, limits=Limits(), about="nothing")._queue
    assert queue.sleep_when_free >= 0.05 and queue.progress_update_sleep_when_free >= 0.05
