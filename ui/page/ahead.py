"""Load the scripts and play the opening before Gradio has mounted: `Ahead` adds `pieces` to Gradio's document.

ui/static/page/ahead.js builds the stage. It finds the parts' templates in Gradio's config, which the document has
anyway, so we add only the first recording and the script that starts the opening.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gradio as gr
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui.page import assets
from ui.recordings.shelf import RecordingOffer
from ui.recordings.viewer import Part

# The recording of the opening's first scene (ui/static/race/opening.js).
FIRST = "one"
# Gradio's document: the pieces go after the first and before the second.
HEAD, BODY = b'<meta charset="utf-8" />', b"<gradio-app"
# If a script or style sheet of Gradio's fails to load, for example because the server is being restarted, the page
# would stay without its form. So it loads again once the server answers, at most RELOADS times. The same holds for
# our scripts (data-bass), but not for our other files.
RELOADS = 5
AGAIN = """
(() => {
  const count = () => history.state?.bassReloads ?? 0;
  let waiting = false;
  async function again() {
    if (waiting || count() >= RELOADS) return;
    waiting = true;
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** count()));
      try {
        await fetch(location.href, { method: "HEAD", cache: "no-store" });
        break;
      } catch {}
    }
    history.replaceState({ ...history.state, bassReloads: count() + 1 }, "");
    location.reload();
  }
  // A page that has held for a minute counts as loaded.
  setTimeout(() => !waiting && history.replaceState({ ...history.state, bassReloads: 0 }, ""), 60_000);
  addEventListener("vite:preloadError", again);
  addEventListener("error", ({ target }) => {
    const address = target.src ?? target.href ?? "";
    if (["SCRIPT", "LINK"].includes(target.tagName) && address
      && (target.hasAttribute("data-bass") || !address.includes("gradio_api/file="))) again();
  }, true);
})();
""".replace("RELOADS", str(RELOADS))
# A part of the document that asks for a password. Quotes within its texts are escaped.
ASKS = b'"auth_required":true'


@dataclass(frozen=True)
class Pieces:
    """HTML for the start of the document's head, and for its body."""

    head: bytes
    body: bytes


def pieces(
    offers: Mapping[str, RecordingOffer],
    header: gr.HTML,
    parts: Mapping[Part, gr.HTML],
    tabs: Sequence[str],
    *,
    replay: bool,
) -> Pieces:
    """Return the pieces for a page. Without the opening's first recording, nothing plays.

    Args:
        parts: the components of viewer.parts that play the opening.
        replay: whether the page has no model.
    """
    head = f'<script>{AGAIN}</script><script data-bass src="{assets.url(assets.bundle())}"></script>'.encode()
    if FIRST not in offers:
        return Pieces(head, b"")
    stage = {
        "header": header._id,
        "parts": {part.name: component._id for part, component in parts.items()},
        "tabs": tabs,
        "name": FIRST,
        "recording": offers[FIRST].recording,
        "replay": replay,
    }
    mounts = ", ".join(f"{part.name}: (element, props, server) => {{ {part.script}; }}" for part in parts)
    # In a new task, because the one that runs the scripts is long enough.
    script = assets.loading(f"setTimeout(() => Bass.raise({{ {mounts} }}))")
    # "<" could end the element.
    document = json.dumps(stage, separators=(",", ":")).replace("<", "\\u003c")
    sheet = (assets.STATIC / assets.STAGE_STYLE).read_text(encoding="utf-8")
    body = (
        f"<style>{sheet}</style>"
        f'<script type="application/json" id="ahead">{document}</script><script>(() => {{ {script} }})();</script>'
    )
    return Pieces(head, body.encode())


class Ahead:
    """Middleware that adds the pieces of the served page to its document."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        added = _pieces_of(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        if added is None:
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def answer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_document(message):
                start = message
            elif start is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    document = _with(bytes(body), added)
                    MutableHeaders(raw=start["headers"])["Content-Length"] = str(len(document))
                    await send(start)
                    await send({"type": "http.response.body", "body": document})

        await self.app(scope, receive, answer)


def _pieces_of(scope: Scope) -> Pieces | None:
    """Return the pieces of the page that Gradio's app serves."""
    page = getattr(scope.get("app"), "blocks", None)
    found: Pieces | None = getattr(page, "ahead", None)
    return found


def _is_document(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return start["status"] == 200 and headers.get("content-type", "").startswith("text/html")


def _with(document: bytes, added: Pieces) -> bytes:
    """Return Gradio's document with the pieces (not the body's if it asks for a password), others unchanged."""
    if HEAD not in document or BODY not in document:
        return document
    head, rest = document.split(HEAD, 1)
    before, after = rest.rsplit(BODY, 1)
    return b"".join((head, HEAD, added.head, before, b"" if ASKS in document else added.body, BODY, after))
