"""The page's files: which of them the browser may fetch, and the tags that fetch them.

Contract: everything comes from the page's own host.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import gradio as gr
import plotly
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).resolve().parents[1] / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = tuple(
    STATIC / name
    for name in ("page/page.css", "page/how.css", "race/strips.css", "race/step.css", "sweep/sweep.css")
)
# In the order of their use: each script may use those before it.
SCRIPTS = (
    "page/page.js", "page/frames.js", "page/alive.js", "page/prompt.js", "race/run.js", "race/compare.js",
    "page/plots.js", "race/tokens.js", "race/spent.js", "race/strip.js", "race/cache.js", "race/step_draw.js",
    "race/step.js", "race/lanes.js", "race/verdict.js", "race/charts.js", "race/tree.js", "race/bill.js",
    "race/inspector.js", "race/export.js", "race/summary.js", "page/how_formulas.js", "page/how_step.js",
    "page/how_first.js", "page/how_last.js", "page/how.js", "sweep/chart.js", "sweep/sweep.js",
)  # fmt: skip
FIRST = STATIC / "page/timers.js"


def serve() -> None:
    """Let Gradio serve the page's scripts and plotly.min.js, and no other file of those packages."""
    gr.set_static_paths([STATIC, PLOTLY])


def url(file: Path) -> str:
    """Address of a served file, relative to the page; its digest makes browsers fetch a changed file anew."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"gradio_api/file={file.as_posix()}?{digest}"


def head() -> str:
    """Script tags for gr.HTML(head=): loaded once and in this order, before any js_on_load runs."""
    return "".join(f'<script src="{url(STATIC / name)}"></script>' for name in SCRIPTS)


class FirstScript:
    """ASGI middleware that puts timers.js first in every HTML page; Blocks.launch(head=) would put it too late.

    Holds back HTML until it is complete, and passes everything else on at once, event streams above all.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}
        body = b""

        async def insert(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_html(message):
                start = message
            elif start and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await _send_page(start, body, send)
            else:
                await send(message)

        await self.app(scope, receive, insert if scope["type"] == "http" else send)


def _is_html(start: Message) -> bool:
    headers = dict(start["headers"])
    return b"content-encoding" not in headers and headers.get(b"content-type", b"").startswith(b"text/html")


async def _send_page(start: Message, body: bytes, send: Send) -> None:
    page = body.replace(b"<head>", f'<head><script src="{url(FIRST)}"></script>'.encode(), 1)
    grown = len(page) - len(body)
    headers = [
        (name, str(int(value) + grown).encode() if name == b"content-length" else value)
        for name, value in start["headers"]
    ]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": page})
