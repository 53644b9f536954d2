"""Middleware that closes the parts of Gradio's server that the page doesn't use, and answers unknown names.

Closed are the routes that take files, keep a visitor's state on disk, or fetch addresses of other hosts. Gradio
would answer an unknown name or event with status 500 and tracebacks in the log; here it is one sentence.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)
# `vibe` routes would edit app.py. A custom component is a file of Gradio's package.
CLOSED = re.compile(
    r"^/gradio_api/(upload|process_recording|deep_link|custom_component|(undo-)?vibe|proxy=|stream/"
    r"|run-history|runs|dev/|file/?=?/*https?:)|^/monitoring"
)
NO_FILES = "The page takes no files and fetches none: this address is closed."
NO_NAME = (
    "The request names an endpoint, a parameter or a component that this page doesn't have: /gradio_api/info "
    "lists the endpoints."
)
NO_EVENT = "There is no such event, or its answer was read already: call the endpoint again."
EVENT = re.compile(r"^/gradio_api/call/(?:v2/)?[^/]+/(?P<event>[^/]+)$")
# Here Gradio looks up names of the request. Errors of handlers don't leave these routes: Gradio answers with them.
NAMES = re.compile(r"^/gradio_api/(run|api|call|queue/join|component_server)")


class Closed:
    """Middleware that refuses these requests in one sentence, and logs one line for an unknown name or event."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        refusal = _refusal(scope, path)
        if refusal is not None:
            return await refusal(scope, receive, send)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            if begun or not NAMES.match(path):
                raise
            log.debug("The error was:", exc_info=True)
            await _unknown(NO_NAME, path, type(error).__name__)(scope, receive, send)


def _refusal(scope: Scope, path: str) -> Response | None:
    """Return the answer to a request that Gradio's app must not get, or None."""
    form = Headers(scope=scope).get("content-type", "").startswith("multipart/")
    # Gradio's login form is the only one.
    if CLOSED.match(path) or (form and path.rstrip("/") != "/login"):
        return PlainTextResponse(NO_FILES, 403)
    page: Any = getattr(scope.get("app"), "blocks", None)
    # The attributes of the queue are Gradio's own (6.31). Without them, Gradio answers.
    with suppress(AttributeError):
        call = EVENT.match(path)
        if call and scope["method"] == "GET" and not _is_known(page._queue, call["event"]):
            return _unknown(NO_EVENT, path)
        session = QueryParams(scope["query_string"]).get("session_hash")
        lost = session is not None and session not in page._queue.pending_messages_per_session
        if lost and path == "/gradio_api/queue/data":
            # Gradio's own message, from which its script learns that the server has been restarted.
            words = {"msg": "unexpected_error", "message": NO_EVENT, "success": False, "session_not_found": True}
            return PlainTextResponse(f"data: {json.dumps(words)}\n\n", media_type="text/event-stream")
    return None


def _is_known(queue: Any, event: str) -> bool:
    """Return whether the event runs, waits, or has an answer that was not read yet."""
    return event in queue.event_ids_to_events or any(
        event in events for events in queue.pending_event_ids_session.values()
    )


def _unknown(sentence: str, path: str, error: str = "unknown") -> Response:
    log.warning("Refused %.100r (%s): %s", path, error, sentence)
    return JSONResponse({"detail": sentence}, 404)
