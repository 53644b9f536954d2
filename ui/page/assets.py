"""The page's files: which of them the browser may fetch, and what fetches them.

Contract: everything comes from the page's own host. The scripts are served as one file, and text is compressed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import mimetypes
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import plotly
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bass_core import BassError, cache_root

STATIC = Path(__file__).resolve().parents[1] / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = ("page/page.css", "how/how.css", "race/race.css", "sweep/sweep.css", "lecture/bar.css")
# Gradio gives each rule of STYLES a copy that holds below its own containers alone (gradio 6.31), so rules for a
# class on the body are in sheets that Gradio does not see.
MODES = ("lecture/presenter.css", "lecture/print.css")
TYPE = re.compile(r"(font-size|line-height): ([\d.]+px)")
# Types that are compressed, and from how many bytes on.
TEXT = re.compile(r"text/|application/(json|javascript)|image/svg")
LEAST_BYTES = 1000
# What a part does before its own script: load the scripts, once for all parts. After a failure it tries again, and
# after the last one it says so.
LOADER = """
const fetchScript = (address) => new Promise((resolve, reject) => {
  const script = document.createElement("script");
  document.head.append(Object.assign(script, { src: address, onload: resolve, onerror: reject }));
});
const fetchPatiently = async (address, pauses) => {
  try {
    await fetchScript(address);
  } catch (error) {
    if (!pauses.length) throw error;
    await new Promise((resolve) => setTimeout(resolve, pauses[0]));
    await fetchPatiently(address, pauses.slice(1));
  }
};
window.bassScripts ??= fetchPatiently(ADDRESS, [500, 1500, 4000]).catch(() => {
  const line = Object.assign(document.createElement("p"), { className: "no-scripts", role: "alert" });
  line.textContent = "The page's scripts could not be loaded: check the connection, then reload the page.";
  document.body.prepend(line);
  return new Promise(() => {});
});
window.bassScripts.then(() => { PART });
"""
# In the order of their use: each script may use those before it.
SCRIPTS = (
    "page/page.js", "page/status.js", "page/prompt.js", "page/early.js", "race/run.js", "race/predicted.js",
    "race/tape.js", "page/form.js", "race/recordings.js", "page/plots.js", "race/tokens.js", "race/strip.js",
    "race/cache.js", "race/step.js", "race/glance.js", "race/lanes.js", "race/charts.js", "race/inspector.js",
    "race/why.js", "race/export.js", "race/summary.js", "how/formulas.js", "how/how.js", "sweep/sweep.js",
    "lecture/presenter.js",
)  # fmt: skip


def serve() -> None:
    """Let Gradio serve the page's scripts and plotly.min.js, and no other file of those packages.

    Windows takes the types of files from its registry, where other programs may have changed them.
    """
    mimetypes.add_type("text/javascript", ".js")
    mimetypes.add_type("text/css", ".css")
    gr.set_static_paths([STATIC, PLOTLY, bundle()])


def url(file: Path) -> str:
    """Address of a served file, relative to the page; its digest makes browsers fetch a changed file anew."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"gradio_api/file={quote(file.as_posix(), safe='/:')}?{digest}"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Holds the bundle until the process ends, if the user's cache cannot."""
    return tempfile.TemporaryDirectory(prefix="bass-page-")


@cache
def bundle() -> Path:
    """All scripts as one file in the user's cache, whose path is the same after a restart and in each replica."""
    scripts = b"\n".join((STATIC / name).read_bytes() for name in SCRIPTS)
    name = f"bass-{hashlib.sha256(scripts).hexdigest()[:12]}.js"
    try:
        return _written(cache_root().resolve() / "page" / name, scripts)
    except (OSError, BassError):
        return _written(Path(_folder().name).resolve() / name, scripts)


def _written(path: Path, content: bytes) -> Path:
    """The path, at which a file with this content lies then; another process may write the same one."""
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        os.replace(part, path)
    return path


def head() -> str:
    """Tags for gr.HTML(head=), which loads each once: the sheets of modes."""
    return "".join(f'<link rel="stylesheet" href="{url(STATIC / name)}">' for name in MODES)


def loading(script: str) -> str:
    """The script, which runs once the page's scripts are there."""
    return LOADER.replace("ADDRESS", json.dumps(url(bundle()))).replace("PART", script)


class Compressed:
    """Compresses text that is no stream: a stream has no length, and compressed it could be held back.

    Files are compressed once, in a thread, and their compressed copies are kept.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files: dict[bytes, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        plain = scope["type"] != "http" or scope["method"] == "HEAD"
        # The type of a file such as a.json.xz is that of its content.
        plain = plain or mimetypes.guess_type(scope["path"])[1] is not None
        if plain or "gzip" not in Headers(scope=scope).get("accept-encoding", ""):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def answer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _compressible(message):
                start = message
            elif start is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    headers = MutableHeaders(raw=start["headers"])
                    # Only files have an ETag.
                    packed = await asyncio.to_thread(self._packed, bytes(body), "etag" in headers)
                    headers["Content-Encoding"], headers["Content-Length"] = "gzip", str(len(packed))
                    headers.add_vary_header("Accept-Encoding")
                    await send(start)
                    await send({"type": "http.response.body", "body": packed})

        await self.app(scope, receive, answer)

    def _packed(self, body: bytes, is_file: bool) -> bytes:
        digest = hashlib.sha256(body).digest()
        packed = self.files.get(digest) or gzip.compress(body, 6)
        if is_file:
            self.files[digest] = packed
        return packed


def _compressible(start: Message) -> bool:
    """Whether an answer that begins like this is a whole text, long enough and not compressed yet."""
    headers = Headers(raw=start["headers"])
    whole = start["status"] != 206 and int(headers.get("content-length", 0)) >= LEAST_BYTES
    return whole and "content-encoding" not in headers and bool(TEXT.match(headers.get("content-type", "")))


def part(template: str, script: str, elem_id: str | None = None, **more: Any) -> gr.HTML:
    """A component with a fixed template; only its script handles values from outside."""
    return gr.HTML(
        html_template=template,
        js_on_load=loading(script),
        head=head(),
        apply_default_css=False,
        elem_id=elem_id,
        **more,
    )


def style() -> str:
    """The stylesheets as one; each length of type in px is multiplied by --type, which presenter.css sets."""
    sheets = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    return TYPE.sub(r"\1: calc(\2 * var(--type, 1))", sheets)
