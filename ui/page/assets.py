"""The page's files: which of them the browser may fetch, and the tags that fetch them.

Contract: everything comes from the page's own host.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import gradio as gr
import plotly
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).resolve().parents[1] / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = (
    "page/page.css", "page/how.css", "page/formulas.css", "race/strips.css", "race/step.css", "race/glance.css",
    "race/tape.css", "race/predicted.css", "sweep/sweep.css",
    "lecture/bar.css",
)  # fmt: skip
# Gradio gives each rule of STYLES a copy that holds below its own containers alone (gradio 6.31), so rules for a
# class on the body stand in sheets that Gradio does not see.
MODES = ("lecture/presenter.css", "lecture/print.css")
TYPE = re.compile(r"(font-size|line-height): ([\d.]+px)")
# In the order of their use: each script may use those before it.
SCRIPTS = (
    "page/page.js", "page/frames.js", "page/alive.js", "page/reload.js", "page/waiting.js", "page/whole.js",
    "page/formulas.js", "page/prompt.js", "race/run.js", "race/predicted.js", "race/tape.js",
    "race/scrubber.js", "race/recordings.js", "race/compare.js",
    "page/plots.js", "race/tokens.js", "race/spent.js", "race/strip.js", "race/cache.js", "race/step_draw.js",
    "race/step.js", "race/lanes.js", "race/beginnings.js", "race/glance.js", "race/verdict.js", "race/charts.js",
    "race/tree.js", "race/inspector.js", "race/export.js", "race/summary.js", "page/how_formulas.js",
    "page/how_step.js", "page/how_first.js", "page/how_last.js", "page/how.js", "sweep/chart.js", "sweep/sweep.js",
    "lecture/presenter.js", "lecture/keys.js",
    "lecture/print.js",
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


def style() -> str:
    """The stylesheets as one; each length of type in px is multiplied by --type, which presenter.css sets."""
    sheets = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    return TYPE.sub(r"\1: calc(\2 * var(--type, 1))", sheets)


def first() -> str:
    """Tags of what must be there before Gradio's own scripts: timers.js, and the sheets of modes."""
    sheets = (f'<link rel="stylesheet" href="{url(STATIC / name)}">' for name in MODES)
    return f'<script src="{url(FIRST)}"></script>{"".join(sheets)}'


class FirstScript:
    """ASGI middleware that puts `first` first in every HTML page; Blocks.launch(head=) would put it too late.

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
    page = body.replace(b"<head>", f"<head>{first()}".encode(), 1)
    grown = len(page) - len(body)
    headers = [
        (name, str(int(value) + grown).encode() if name == b"content-length" else value)
        for name, value in start["headers"]
    ]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": page})
