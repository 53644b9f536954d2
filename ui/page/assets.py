"""The page's scripts and style sheets, and how the browser gets them.

Everything comes from the page's own host. The scripts are ES modules, served as one file that holds their import
map. ui/page/ahead.py adds it to Gradio's document. Text is compressed.
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
import time
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO
from urllib.parse import quote

import gradio as gr
import plotly
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bass_core import BassError, cache_root

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

STATIC = Path(__file__).resolve().parents[1] / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = (
    "page/page.css",
    "how/how.css",
    "race/race.css",
    "race/axis.css",
    "race/step.css",
    "race/exact.css",
    "sweep/sweep.css",
    "sweep/readers.css",
    "lecture/bar.css",
    "lecture/bet.css",
)
# Gradio 6.31 replaces each rule of STYLES by a copy that applies only inside Gradio's containers. The copies would
# not apply to the body, so rules for a class on the body are in separate sheets, which Gradio does not process.
MODES = ("lecture/presenter.css", "lecture/print.css")
# The sheet that a page saved as a file has first, in place of Gradio's own.
FILE_STYLE = "race/file.css"
# The sheet of the opening that plays before Gradio has mounted (ahead.py).
STAGE_STYLE = "page/ahead.css"
TYPE = re.compile(r"(font-size|line-height): ([\d.]+px)")
_HELD: list[BinaryIO] = []
# A file of `kept` in the user's cache that no start has used for this long is deleted.
KEPT_S = 14 * 24 * 3600
# TEXT: the content types that are compressed. LEAST_BYTES: the smallest size that is worth compressing.
TEXT = re.compile(r"text/|application/(json|javascript)|image/svg")
LEAST_BYTES = 1000
# Added to zlib's window size, it asks for gzip's header.
GZIP = 16
# Gradio runs this for each part of the page. Events of Gradio's may fire before the scripts have been loaded.
LOADER = """import("bass/main.js").then(() => { PART }, () => {
  if (document.querySelector(".no-scripts")) return;
  const line = Object.assign(document.createElement("p"), { className: "no-scripts", role: "alert" });
  line.textContent = "The page's scripts could not be loaded: check the connection, then reload the page.";
  document.body.prepend(line);
});"""
# Characters of a script that its data: URL has as they are.
PLAIN = " !$&'()*+,-./:;=?@[]^_`{|}~"
# Adds the import map to the document, before any module is loaded.
MAPPER = """document.currentScript.after(
  Object.assign(document.createElement("script"), { type: "importmap", textContent: MAP }));
"""


def serve(*more: Path) -> None:
    """Let Gradio serve the page's scripts, plotly.min.js and these files, and no other files of those packages."""
    # Windows reads file types from its registry, which other programs may have changed.
    mimetypes.add_type("text/javascript", ".js")
    mimetypes.add_type("text/css", ".css")
    gr.set_static_paths([STATIC, PLOTLY, bundle(), *more])


def url(file: Path) -> str:
    """Return a served file's address, relative to the page. The digest makes browsers refetch a changed file."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"gradio_api/file={quote(file.as_posix(), safe='/:')}?{digest}"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the files of `kept`, used if the user's cache is not writable. It is deleted at exit."""
    return tempfile.TemporaryDirectory(prefix="bass-page-")


def import_map() -> str:
    """Return an import map with all scripts: they import each other as "bass/" and their path in `STATIC`."""
    scripts = {f"bass/{path.relative_to(STATIC).as_posix()}": path for path in sorted(STATIC.rglob("*.js"))}
    named = {name: f"{path.read_text(encoding='utf-8')}//# sourceURL={name}\n" for name, path in scripts.items()}
    urls = {name: f"data:text/javascript;charset=utf-8,{quote(text, PLAIN)}" for name, text in named.items()}
    return json.dumps({"imports": urls})


@cache
def bundle() -> Path:
    """Return the file with all scripts."""
    return kept(MAPPER.replace("MAP", json.dumps(import_map())).encode(), "js")


def kept(content: bytes, ending: str) -> Path:
    """Return a file with this content, in the user's cache. Restarts and replicas get the same path."""
    name = f"bass-{hashlib.sha256(content).hexdigest()[:12]}.{ending}"
    try:
        path = cache_root().resolve() / "page" / name
        # Twice, because the cleanup of another process may delete the file before it is locked.
        for _ in range(2):
            _hold(_written(path, content))
        _delete_unused(path.parent)
        return path
    except (OSError, BassError):
        return _written(Path(_folder().name).resolve() / name, content)


def _written(path: Path, content: bytes) -> Path:
    """Write the file unless it has this content already, and return its path. Safe for concurrent processes."""
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        os.replace(part, path)
    return path


def _hold(path: Path) -> None:
    """Lock the file until this process ends, and mark it as used now."""
    # A read-only file can't be marked, and some file systems have no locks.
    with suppress(OSError):
        _HELD.append(path.open("rb"))
        os.utime(path)
        if fcntl is not None:
            fcntl.flock(_HELD[-1], fcntl.LOCK_SH)


def _delete_unused(folder: Path) -> None:
    """Delete files of `kept`, and parts of them, that no process holds and no start has used for KEPT_S."""
    for path in folder.glob("bass-*"):
        # Windows can't delete a file that a process holds open.
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < KEPT_S:
                continue
            with path.open("rb") as file:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            if fcntl is None:
                path.unlink()


def head() -> str:
    """Return the <link> tags of MODES for gr.HTML(head=), which loads each sheet only once."""
    return "".join(f'<link rel="stylesheet" href="{url(STATIC / name)}">' for name in MODES)


def loading(script: str) -> str:
    """Return JavaScript that runs `script` once the page's scripts have been loaded."""
    return LOADER.replace("PART", script)


class Compressed:
    """Middleware that compresses text with gzip. Files are compressed once, in a thread, and then cached.

    Event streams, e.g. a race's updates, are compressed message by message, so that none waits for the next. Other
    answers without a Content-Length pass unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files: dict[bytes, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        plain = scope["type"] != "http" or scope["method"] == "HEAD"
        # Skip files that are compressed already, such as a.json.xz: their type is that of the content inside.
        plain = plain or mimetypes.guess_type(scope["path"])[1] is not None
        if plain or "gzip" not in Headers(scope=scope).get("accept-encoding", ""):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()
        stream: Any = None

        async def answer(message: Message) -> None:
            nonlocal start, stream
            if message["type"] == "http.response.start" and _compressible(message):
                start = message
            elif message["type"] == "http.response.start" and _is_event_stream(message):
                # The fastest level: a lane may be timing its rounds meanwhile.
                stream = zlib.compressobj(1, wbits=zlib.MAX_WBITS | GZIP)
                headers = MutableHeaders(raw=message["headers"])
                headers["Content-Encoding"] = "gzip"
                headers.add_vary_header("Accept-Encoding")
                await send(message)
            elif stream is not None and message["type"] == "http.response.body":
                flush = zlib.Z_SYNC_FLUSH if message.get("more_body", False) else zlib.Z_FINISH
                packed = stream.compress(message.get("body", b"")) + stream.flush(flush)
                await send({**message, "body": packed})
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


def _is_event_stream(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return headers.get("content-type", "").startswith("text/event-stream") and "content-encoding" not in headers


def _compressible(start: Message) -> bool:
    """Return whether the response is a complete text that is long enough and not compressed yet."""
    headers = Headers(raw=start["headers"])
    whole = start["status"] != 206 and int(headers.get("content-length", 0)) >= LEAST_BYTES
    return whole and "content-encoding" not in headers and bool(TEXT.match(headers.get("content-type", "")))


def part(template: str, script: str, elem_id: str | None = None, **more: Any) -> gr.HTML:
    """Return a component with a fixed template. Values from outside go only to its script."""
    return gr.HTML(
        html_template=template,
        js_on_load=loading(script),
        head=head(),
        apply_default_css=False,
        elem_id=elem_id,
        **more,
    )


def style() -> str:
    """Return STYLES as one sheet, with every font size multiplied by --type, which presenter.css sets."""
    sheets = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    return TYPE.sub(r"\1: calc(\2 * var(--type, 1))", sheets)
