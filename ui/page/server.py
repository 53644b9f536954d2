"""The server of the program. It stays the same from the start to the end and shows one page after the other.

Call `bind`, then enter a `PageServer`, and give it each page with `PageServer.open`. The port never closes between
two pages, so no request of a visitor is refused. Until the first page, every request gets status 503; in a browser
that is a page which reloads as soon as there is another.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    import gradio as gr
    from starlette.applications import Starlette

STARTING = Path(__file__).resolve().parents[1] / "static" / "page" / "starting.html"
WAIT = "The page is starting: ask again in a few seconds."
# How long the end of the server may wait for its open connections; Gradio waits as long for its own.
END_S = 5.0


def bind(address: str, ports: Iterable[int]) -> list[socket.socket]:
    """Return sockets at the first of these ports that is free, or [] if the address or all ports can't be used.

    Not every address of a host has to work: localhost may also stand for an IPv6 address that this machine doesn't
    have. But a port that is in use at one of them counts as taken.
    """
    try:
        places = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # A host may be listed twice.
    places = list(dict.fromkeys(places))
    return next((sockets for port in ports if (sockets := _bound(places, port))), [])


def _bound(places: list[Any], port: int) -> list[socket.socket]:
    """Return sockets at this port of all places that this machine has, or [] if the port is in use."""
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, (host, _, *rest) in places:
        try:
            sockets.append(_listening(socket.socket(family, kind, protocol), (host, port, *rest)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for other in sockets:
                    other.close()
                return []
    return sockets


def _listening(one: socket.socket, place: Any) -> socket.socket:
    """Return the socket, listening at this place."""
    try:
        if os.name == "posix":  # the port of a page that has just ended is free
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one.family == socket.AF_INET6:  # IPv4 has a separate socket
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(place)
        one.listen()
    except OSError:
        one.close()
        raise
    return one


async def starting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request while there is no page."""
    accepted = Headers(scope=scope).get("accept", "")
    browser = scope.get("method") in ("GET", "HEAD") and "text/html" in accepted
    headers = {"Retry-After": "2", "Cache-Control": "no-store"}
    response = (
        HTMLResponse(STARTING.read_text(encoding="utf-8"), 503, headers)
        if browser
        else PlainTextResponse(WAIT, 503, headers)
    )
    await response(scope, receive, send)


class PageServer(uvicorn.Server):
    """A server for one page after the other, in a separate thread from entering until leaving."""

    def __init__(self, sockets: list[socket.socket], address: str) -> None:
        self.address, self.port = address, int(sockets[0].getsockname()[1])
        bare = address.strip("[]")
        host = "localhost" if bare in ("0.0.0.0", "::") else f"[{bare}]" if ":" in bare else bare
        self.url = f"http://{host}:{self.port}/"
        self._app: ASGIApp = starting
        config = uvicorn.Config(
            self._answer, address, self.port, interface="asgi3", lifespan="off", log_level="warning"
        )
        super().__init__(config)
        self._thread = threading.Thread(target=self.run, args=[sockets], name="bass-server", daemon=True)

    def __enter__(self) -> PageServer:
        self._thread.start()
        while not self.started and self._thread.is_alive():
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the port and end the thread. Another call does nothing."""
        if self.should_exit:
            return
        self.should_exit = True
        # Each open tab holds a connection, which Gradio ends at this event.
        if stop := getattr(self._app, "stop_event", None):
            self._loop.call_soon_threadsafe(stop.set)
        self._thread.join(END_S)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve in the running loop until `close`."""
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as self._lifespans:
            await super().serve(sockets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _show(self, app: Starlette) -> None:
        """Answer new requests with this app. Requests that have begun stay with the app before."""
        await self._lifespans.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    def open(self, page: gr.Blocks, **options: Any) -> tuple[str, str | None]:
        """Show this page in place of the one before; return its local address, and its public one or None.

        The page before is not closed: its running requests go on. Its own `close` leaves the port open.
        """
        from gradio import http_server

        def start(app: Starlette, **_: Any) -> tuple[str, int, str, Shown]:
            asyncio.run_coroutine_threadsafe(self._show(app), self._loop).result()
            return self.address, self.port, self.url, Shown(self, app)

        # Gradio's launch starts a server. It would also ask its own address once, for three seconds, and fail on a
        # busy machine (`_frontend`).
        gradios = http_server.start_server
        http_server.start_server = cast("Any", start)
        try:
            _, url, public = page.launch(prevent_thread_lock=True, quiet=True, _frontend=False, **options)
        finally:
            http_server.start_server = gradios
        return url, public


class Shown:
    """What Gradio takes for the page's own server, and closes with the page."""

    def __init__(self, server: PageServer, app: ASGIApp) -> None:
        self._server, self._app = server, app

    def close(self) -> None:
        """Close the server, unless it shows another page by now."""
        if self._server._app is self._app:
            self._server.close()
