"""Contract: which files the browser may fetch, and the tags that fetch them; all from the page's own host."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gradio as gr
import plotly

STATIC = Path(__file__).resolve().parent / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = STATIC / "page.css"
# In this order: each uses the ones before it.
SCRIPTS = (
    "page.js", "alive.js", "run.js", "plots.js", "tokens.js", "timeline.js", "lanes.js", "charts.js",
    "inspector.js", "export.js", "summary.js", "how.js",
)  # fmt: skip


def serve() -> None:
    """Let Gradio serve the page's own scripts and plotly.min.js, and nothing else of those packages."""
    gr.set_static_paths([STATIC, PLOTLY])


def url(file: Path) -> str:
    """Address of a served file, relative to the page; the digest makes a changed file a new address."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"gradio_api/file={file.as_posix()}?{digest}"


def head() -> str:
    """Script tags for gr.HTML(head=): loaded once and in this order, before any js_on_load runs."""
    return "".join(f'<script src="{url(STATIC / name)}"></script>' for name in SCRIPTS)
