"""Puts the page together: settings, lanes, charts, inspector, summary, and the events that connect them.

Users' scripts may rely on these DOM ids: prompt, batch-size, max-new-tokens, temperature, seed, run, stop, and
"lane-" plus the lane's name. Each sequence is an element of class "sequence".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ui.page import assets, presenter
from ui.page.ahead import Ahead, Pieces, pieces
from ui.page.choices import Choices
from ui.page.closed import Closed
from ui.page.events import FAILED, Events
from ui.page.form import NOTE, Form, form, restore_script
from ui.page.limits import Limits
from ui.page.request import describe_parameters
from ui.race import draws, feed, how, parts
from ui.recordings import viewer, webpage
from ui.recordings.shelf import SHIPPED, RecordingOffer
from ui.sources.source import Count, RaceSource, Together
from ui.sweep import panel as sweep
from ui.sweep.events import SweepEvents

TITLE = "BASS: batched speculative decoding"
TABS = ("Race", "Sweep", "How it works")
# System fonts cover every alphabet and weight, and need no download.
FONT = ("Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Liberation Sans", "Arial", "sans-serif")
WRONG_TYPE = "A value in the request has the wrong type"
BROWSER_ONLY = "This event belongs to the page's own script and does nothing on the server: call /race instead."


class Page(gr.Blocks):
    """Blocks that answer a malformed request with one sentence and log no traceback.

    Attributes:
        ahead: HTML that is added to the document for the opening (ui/page/ahead.py), or None.
    """

    ahead: Pieces | None = None

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *rest: Any, **options: Any) -> Any:
        """Return the handler's arguments from the values of a request.

        Raises:
            gr.Error: if values are missing or have the wrong type, or if the event has no handler on the server.
        """
        if block_fn.fn is None:
            raise gr.Error(BROWSER_ONLY, print_exception=False)
        try:
            return await super().preprocess_data(block_fn, inputs, *rest, **options)
        except Exception as error:
            missing = len(block_fn.inputs) - len(inputs)
            message = (
                f"The request lacks {missing} of {len(block_fn.inputs)} values" if missing > 0 else WRONG_TYPE
            )
            message = error.message if isinstance(error, gr.Error) else f"{message}: /gradio_api/info lists them."
            raise gr.Error(message, print_exception=False) from error


def build(
    source: RaceSource | None,
    *,
    limits: Limits,
    about: str,
    choices: Choices | None = None,
    pair: Mapping[str, Any] | None = None,
    count: Count | None = None,
    offers: Mapping[str, RecordingOffer] | None = None,
    at_once: int = 1,
    together: Together | None = None,
    preparing: Callable[[], str] | None = None,
    early_source: RaceSource | None = None,
    advice: str | None = None,
) -> gr.Blocks:
    """Build the page. Launch it with `launch_options`.

    Args:
        source: runs the races. Without one, the page only plays recordings, and its Run button is called Play.
        about: one line that names the models and the device. While they are prepared: the pair's name, or "".
        choices: the entries of the form's lists.
        pair: the arguments of load_pair, for the page's code snippet.
        count: returns the length of a prompt.
        offers: the recordings that can be watched, by default those that ship.
        at_once: how many races of page and API are handed to the source at the same time.
        together: runs the races of a sweep (ui/sources/source.py).
        preparing: returns the progress as JSON, for the page before the model is loaded (ui/page/early.py).
        early_source: answers `/race` and `/sweep` on that page.
        advice: a sentence for the operator, below the form; from bass_core, so it holds no markup.
    """
    shell = webpage.shell_file()
    assets.serve(shell)
    offers = SHIPPED if offers is None else offers
    plotly = json.dumps(assets.url(assets.PLOTLY))
    answers = source or early_source
    events = None if answers is None else Events(answers, limits, pair, together)
    sweeps = None if events is None else SweepEvents(events)
    device = {"concurrency_limit": at_once, "concurrency_id": "device"}
    with Page(title=TITLE, analytics_enabled=False, fill_width=True) as page:
        header = gr.HTML(
            html_template=_header(source is None and preparing is None),
            value=about,
            js_on_load=_ABOUT,
            apply_default_css=False,
        )
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab(TABS[0], id="race"), gr.Row(elem_id="workspace"):
                offered = choices or Choices()
                assets.part(presenter.template(offered), "Bass.mountPresenter(element)", elem_id="presenter")
                with gr.Column(elem_id="settings", min_width=280, scale=0):
                    status = assets.part(
                        '<p class="message" role="alert"></p><p class="place"></p><div class="measuring" hidden>'
                        '<progress max="1" aria-label="Progress of the measurements"></progress>'
                        '<span></span></div><p class="of-lanes"></p>',
                        "Bass.mountStatus(element, props, watch); Bass.mountForm(element)",
                        elem_id="status-line",
                        render=False,
                    )
                    settings = form(limits, offered, status, count=count, recording=source is None)
                    if preparing is not None:
                        _early(preparing, about)
                    if advice is not None:
                        assets.part(f'<p class="part-about pair-advice">{advice}</p>', "")
                with gr.Column(elem_id="results", min_width=280):
                    below_lanes = partial(draws.panel, None if source is None else events, device)
                    viewed = viewer.build(offers, below_lanes, offered.here)
                    assets.part(parts.charts(), f"Bass.mountCharts(element, {plotly})")
                    saving = f"Bass.mountSaving(element, {json.dumps(assets.url(shell))})"
                    assets.part(parts.summary(), f"Bass.mountSummary(element); {saving}")
                    feeds = [_feed(kind) for kind in ("log", "view", "charts")]
            with gr.Tab(TABS[1], id="sweep", render_children=True):
                sweep.panel(None if source is None else sweeps, settings, device)
            with gr.Tab(TABS[2], id="how", render_children=True):
                balance = (offered.here or {}).get("balance")
                assets.part(how.template(balance), "Bass.mountHow(element)")
        if events is not None and sweeps is not None:
            gr.api(sweeps.api, api_name="sweep", **device)
            if source is not None:
                _bind(page, events, settings, feeds, status, device)
            endpoint = gr.api(events.api, api_name="race", **device)
            inputs = [page.blocks[block_id] for block_id in endpoint["inputs"]]
            describe_parameters(inputs, limits, offered)
    played = {part: component for part, component in viewed.items() if part.name in ("lanes", "tape")}
    page.ahead = pieces(offers, header, played, TABS, replay=source is None)
    page.queue(max_size=16)
    # Except on Windows, Gradio's queue polls every millisecond, and each poll takes the GIL from the decoder.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = 0.05
    return page


def launch_options(at_once: int = 1) -> dict[str, Any]:
    """Return keywords for Blocks.launch(): the page's look, with the unused parts of Gradio turned off."""
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
    return {
        "theme": theme,
        "app_kwargs": {"middleware": [Middleware(Closed), Middleware(assets.Compressed), Middleware(Ahead)]},
        "css": assets.style(),
        "footer_links": ["api"],
        "show_error": False,
        "ssr_mode": False,
        "run_history": False,
        # closed.py closes the routes of uploads; this is the least that Gradio lets them be.
        "max_file_size": 1,
        "enable_monitoring": False,
        # Else environment variables could turn them on: workers that serve files, and tools for other programs.
        "num_workers": 0,
        "mcp_server": False,
        # Gradio copies the settings for each session, and every request of a script is a new session.
        "state_session_capacity": 64,
        # Each running event occupies a thread while it waits for its next snapshot.
        "max_threads": 40 + at_once,
    }


_ABOUT = "const about = element.querySelector('.about-pair'); about.textContent = about.title = props.value"


def _early(progress: Callable[[], str], name: str) -> None:
    """Add the progress of the model's preparation to the current layout."""

    # A new function each time, because Gradio sets attributes on it.
    def preparing(_: object = None) -> str:
        return progress()

    what = f"The pair {escape(name)}" if name else "The model"
    line = (
        f'<div class="early" data-replay><p role="status">{what} is being prepared. Races can start as soon as '
        'it is ready.</p><progress max="1" aria-label="Progress of the preparation"></progress></div>'
    )
    assets.part(line, "Bass.mountEarly(element, server)", server_functions=[preparing])


def _feed(kind: str) -> gr.HTML:
    """Return an invisible component that hands its text to the scripts that draw it."""
    script = f"Bass.mountFeed({json.dumps(kind)}, props, watch, server)"
    if kind != "log":
        return assets.part('<div class="feed" hidden></div>', script)

    # A new function each time, because Gradio sets attributes on it.
    def missed(question: Any) -> str:
        run, first = question if isinstance(question, list) and len(question) == 2 else (None, None)
        return feed.missed(run, first)

    return assets.part('<div class="feed" hidden></div>', script, server_functions=[missed])


def _header(recording: bool) -> str:
    mark = "<p data-replay>Recorded races, played at their original pace; no model is loaded.</p>"
    about = '<p class="about-pair"></p><p class="about-clock"></p>'
    return viewer.header(f"{mark if recording else ''}{about}{presenter.SWITCH}")


def _bind(
    page: gr.Blocks, events: Events, settings: Form, feeds: list[gr.HTML], status: gr.HTML, device: dict[str, Any]
) -> None:
    """Connect the events of the page. `device`: the concurrency settings of events that use the device."""
    fields = list(settings.fields.values())
    race = settings.run.click(
        events.run,
        inputs=fields,
        outputs=[*feeds, status, settings.run],
        js="(...values) => Bass.asking(...values)" if fields else None,
        trigger_mode="once",
        # status.js reads the place in the queue from Gradio's progress line.
        show_progress="minimal",
        show_progress_on=status,
        api_visibility="private",
        **device,
    )
    race.failure(None, None, [status, settings.run], js=FAILED)
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
        page.load(None, settings.note, settings.note, js=NOTE, show_progress="hidden")
