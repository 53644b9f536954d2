"""The page's files: which of them the browser may fetch, and the tags that fetch them.

Contract: everything comes from the page's own host.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import plotly

STATIC = Path(__file__).resolve().parents[1] / "static"
PLOTLY = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
STYLES = ("page/page.css", "how/how.css", "race/race.css", "sweep/sweep.css", "lecture/bar.css")
# Gradio gives each rule of STYLES a copy that holds below its own containers alone (gradio 6.31), so rules for a
# class on the body are in sheets that Gradio does not see.
MODES = ("lecture/presenter.css", "lecture/print.css")
TYPE = re.compile(r"(font-size|line-height): ([\d.]+px)")
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
    gr.set_static_paths([STATIC, PLOTLY])


def url(file: Path) -> str:
    """Address of a served file, relative to the page; its digest makes browsers fetch a changed file anew."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"gradio_api/file={quote(file.as_posix(), safe='/:')}?{digest}"


def head() -> str:
    """Tags for gr.HTML(head=), which loads each once: the sheets of modes, and the scripts, in this order and
    before any js_on_load runs.
    """
    sheets = (f'<link rel="stylesheet" href="{url(STATIC / name)}">' for name in MODES)
    return "".join([*sheets, *(f'<script src="{url(STATIC / name)}"></script>' for name in SCRIPTS)])


def part(template: str, script: str, elem_id: str | None = None, **more: Any) -> gr.HTML:
    """A component with a fixed template; only its script handles values from outside."""
    return gr.HTML(
        html_template=template, js_on_load=script, head=head(), apply_default_css=False, elem_id=elem_id, **more
    )


def style() -> str:
    """The stylesheets as one; each length of type in px is multiplied by --type, which presenter.css sets."""
    sheets = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    return TYPE.sub(r"\1: calc(\2 * var(--type, 1))", sheets)
