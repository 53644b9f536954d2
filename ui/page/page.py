"""Puts the page together: settings, lanes, charts, inspector, summary, and the events that connect them.

Contract: element ids stay stable for users' own scripts: prompt, batch-size, max-new-tokens, temperature, seed,
run, stop, and "lane-" with its name for each lane; each sequence is an element of class "sequence".
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ui.page import assets
from ui.page.choices import Choices
from ui.page.events import Events
from ui.page.form import Form, form, restore_script
from ui.page.limits import Limits
from ui.race import charts, how, inspector, lanes, summary
from ui.sources.count import Count
from ui.sources.source import Source

TITLE = "BASS: batched speculative decoding"
# System fonts: they cover every alphabet and weight, and need no download.
FONT = ("Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Liberation Sans", "Arial", "sans-serif")
MISFIT = "A value in the request has the wrong type"
BROWSER_ALONE = "This event belongs to the page's own script and does nothing on the server: call /race."


class Page(gr.Blocks):
    """Blocks that answer a malformed request with one sentence and log no traceback."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *rest: Any, **options: Any) -> Any:
        """The handler's arguments, from a request's values.

        Raises gr.Error for missing or misfitting values, and for an event without a handler on the server.
        """
        if block_fn.fn is None:
            raise gr.Error(BROWSER_ALONE, print_exception=False)
        try:
            return await super().preprocess_data(block_fn, inputs, *rest, **options)
        except Exception as error:
            missing = len(block_fn.inputs) - len(inputs)
            message = f"The request lacks {missing} of {len(block_fn.inputs)} values" if missing > 0 else MISFIT
            message = error.message if isinstance(error, gr.Error) else f"{message}: /gradio_api/info lists them."
            raise gr.Error(message, print_exception=False) from error


def build(
    source: Source,
    *,
    limits: Limits,
    about: str,
    choices: Choices | None = None,
    pair: Mapping[str, Any] | None = None,
    count: Count | None = None,
    recording: bool = False,
    at_once: int = 1,
) -> gr.Blocks:
    """The page for races of `source`; `about` names the models and the device. Launch it with launch_options().

    `choices` is what the settings offer, `pair` the arguments of load_pair for the page's snippet, `count`
    says how long a prompt is (prompt_length.py). With `recording`, `about` describes the recording, and Run plays
    it. `at_once` races are handed to the source together; the page and the API share these places.
    """
    assets.serve()
    events = Events(source, limits, pair)
    plotly = json.dumps(assets.url(assets.PLOTLY))
    with Page(title=TITLE, analytics_enabled=False, fill_width=True) as page:
        gr.HTML(html_template=_header(recording), value=about, js_on_load=_ABOUT, apply_default_css=False)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Race", id="race"), gr.Row(elem_id="workspace"):
                with gr.Column(elem_id="settings", min_width=280, scale=0):
                    status = _html(
                        '<p class="message" role="alert"></p>',
                        "Bass.mountStatus(element, props, watch)",
                        elem_id="status-line",
                        render=False,
                    )
                    settings = form(limits, choices or Choices(), status, count=count, recording=recording)
                with gr.Column(elem_id="results", min_width=280):
                    _html(lanes.template(), "Bass.mountLanes(element)")
                    _html(charts.template(), f"Bass.mountCharts(element, {plotly})")
                    _html(inspector.template(), f"Bass.mountInspector(element, {plotly})")
                    _html(summary.template(), f"Bass.mountSummary(element, {plotly})")
                    feeds = [_feed(kind) for kind in ("log", "view", "charts")]
            with gr.Tab("How it works", id="how", render_children=True):
                _html(how.template(), f"Bass.mountHow(element, {plotly})")
        _bind(page, events, settings, feeds, status, at_once)
    page.queue(max_size=16)
    _calm(page)
    return page


def _calm(page: gr.Blocks) -> None:
    """Let Gradio's queue poll 20 times a second, as it does on Windows.

    Elsewhere it polls every millisecond (gradio 6.31), and each poll takes the GIL from the decoder.
    """
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(page._queue, name):
            setattr(page._queue, name, 0.05)


def launch_options(at_once: int = 1) -> dict[str, Any]:
    """Keywords for Blocks.launch(): the page's look, with the unused parts of Gradio turned off.

    `at_once`: that of `build`.
    """
    # Gradio's own greys and blue have too little contrast on white.
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONT).set(
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        color_accent="*primary_700",
    )
    options = {
        "theme": theme,
        "css_paths": list(assets.STYLES),
        "footer_links": ["api"],
        "show_error": False,
        "ssr_mode": False,
        "app_kwargs": {"middleware": [Middleware(assets.FirstScript)]},
        "run_history": False,
        # In bytes: the page needs no uploads, and a visitor's uploads would fill the disk.
        "max_file_size": 1,
        # Gradio keeps a copy of the settings for each session, and every request of a script is a new session.
        "state_session_capacity": 64,
        # Each running event takes a thread while it waits for its next snapshot.
        "max_threads": 40 + at_once,
    }
    known = inspect.signature(gr.Blocks.launch).parameters
    return {name: value for name, value in options.items() if name in known}


_ABOUT = "element.querySelector('.about-pair').textContent = props.value"


_FAILED = """() => [
  JSON.stringify({
    phase: "lost", message: "The server is busy or unreachable: try again in a moment.", key: Date.now()}),
  {__type__: "update", interactive: true}]"""


def _html(template: str, script: str, elem_id: str | None = None, render: bool = True) -> gr.HTML:
    """A component with a fixed template; only its script handles values from outside."""
    return gr.HTML(
        html_template=template,
        js_on_load=script,
        head=assets.head(),
        apply_default_css=False,
        elem_id=elem_id,
        render=render,
    )


def _feed(kind: str) -> gr.HTML:
    """An invisible component that hands its value, a text, to the scripts that draw it."""
    return _html('<div class="feed" hidden></div>', f"Bass.mountFeed({json.dumps(kind)}, props, watch)")


def _header(recording: bool) -> str:
    mark = '<p class="recording-mark">Recording, played at its original pace</p>' if recording else ""
    return (
        '<header class="bass-header"><h1>BASS</h1><p>One prompt, one model, several ways to decode: which is '
        f'faster, and why.</p>{mark}<p class="about-pair"></p></header>'
    )


def _bind(
    page: gr.Blocks, events: Events, settings: Form, feeds: list[gr.HTML], status: gr.HTML, at_once: int
) -> None:
    device: dict[str, Any] = {"concurrency_limit": at_once, "concurrency_id": "device"}
    fields = list(settings.fields.values())
    race = settings.run.click(
        events.run,
        inputs=fields,
        outputs=[*feeds, status, settings.run],
        trigger_mode="once",
        # Gradio's line shows the place in the queue.
        show_progress="minimal",
        show_progress_on=status,
        api_visibility="private",
        **device,
    )
    # For a full queue, a lost server or a stopped race: then no generator is left to report it.
    race.failure(None, None, [status, settings.run], js=_FAILED)
    settings.stop.click(
        events.stop,
        outputs=[status, settings.run],
        cancels=[race],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    if fields:
        page.load(None, fields, fields, js=restore_script(settings), show_progress="hidden")
        # A link brings settings of its own, of which the first preset's sentence is not true.
        linked = "(now) => location.hash.startsWith('#race?') ? '' : now"
        page.load(None, settings.note, settings.note, js=linked, show_progress="hidden")
    gr.api(events.api, api_name="race", **device)
