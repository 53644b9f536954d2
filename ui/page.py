"""Contract: puts the page together: settings, lanes, charts, and the events that join them to the race.

Element ids are kept stable for users' own scripts: prompt, batch-size, max-new-tokens, temperature, seed,
run, stop, lane-regular, lane-speculative, lane-bass; each sequence is an element of class "sequence".
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import gradio as gr

from ui import assets, charts, lanes
from ui.events import Events, Source
from ui.limits import Limits

TITLE = "BASS: batched speculative decoding"
EXAMPLES = {
    "Code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "Prose": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Question": "Why is the sky blue? Explain it to a ten-year-old.",
    "Rewriting": (
        "Repeat the following text word for word:\n\n"
        "The tide came in slowly over the flat sand. The children ran ahead of the tide and the dog ran after "
        "the children, and when the tide turned, the children turned, and the dog turned with them."
    ),
}
# The reader's own fonts: whole alphabets in every weight, and nothing to fetch.
FONT = ("Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Liberation Sans", "Arial", "sans-serif")
# One queue slot for the device, whoever asks: the page and the API share it.
DEVICE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "device"}


def build(source: Source, *, limits: Limits, about: str) -> gr.Blocks:
    """The page over `source`; `about` names the models and the device. Launch it with launch_options()."""
    assets.serve()
    events = Events(source, limits)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as page:
        gr.HTML(html_template=_header(), value=about, js_on_load=_ABOUT, apply_default_css=False)
        with gr.Row(elem_id="workspace"):
            with gr.Column(elem_id="settings", min_width=280, scale=0):
                settings, run, stop = _settings(limits)
                status = _html('<p class="message" role="alert"></p>', "Bass.mountStatus(element, props, watch)")
            with gr.Column(elem_id="results", min_width=280):
                _html(lanes.template(), "Bass.mountLanes(element)")
                _html(charts.template(), f"Bass.mountCharts(element, {json.dumps(assets.url(assets.PLOTLY))})")
                feeds = [_feed(kind) for kind in ("log", "view", "charts")]
        _bind(events, settings, run, stop, feeds, status)
    return page.queue(max_size=16)


def launch_options() -> dict[str, Any]:
    """Keywords for Blocks.launch(): the page's look, and no part of Gradio that it does not use."""
    options = {
        "theme": gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONT),
        "css_paths": [assets.STYLES],
        "footer_links": ["api"],
        "show_error": False,
        "ssr_mode": False,
        "run_history": False,
        # The page takes no files, and what a visitor uploads all the same would fill the disk.
        "max_file_size": 1,
    }
    known = inspect.signature(gr.Blocks.launch).parameters
    return {name: value for name, value in options.items() if name in known}


_ABOUT = "element.querySelector('.about-pair').textContent = props.value"


_FAILED = """() => [
  JSON.stringify({phase: "lost", message: "The server is busy or gone: try again in a moment.", key: Date.now()}),
  {__type__: "update", interactive: true}]"""


def _html(template: str, script: str) -> gr.HTML:
    """A component whose template is fixed and whose script alone touches what comes from outside."""
    return gr.HTML(html_template=template, js_on_load=script, head=assets.head(), apply_default_css=False)


def _feed(kind: str) -> gr.HTML:
    """Shows nothing; hands its value, a text, to the scripts that draw it."""
    return _html('<div class="feed" hidden></div>', f"Bass.mountFeed({json.dumps(kind)}, props, watch)")


def _header() -> str:
    return (
        '<header class="bass-header"><h1>BASS</h1><p>One prompt, one model, three ways to decode: who is faster, '
        'and why.</p><p class="about-pair"></p></header>'
    )


def _settings(limits: Limits) -> tuple[list[gr.components.Component], gr.Button, gr.Button]:
    """The form; numbers carry no bounds here, so that every refusal is one of our own sentences."""
    prompt = gr.Textbox(
        label="Prompt", value=EXAMPLES["Code"], lines=4, max_lines=10, elem_id="prompt", autofocus=False
    )
    with gr.Row(elem_id="examples"):
        for name, text in EXAMPLES.items():
            button = gr.Button(name, size="sm", min_width=60)
            button.click(None, None, prompt, js=f"() => {json.dumps(text)}", show_progress="hidden")
    with gr.Row(elem_id="numbers"):
        numbers = [
            gr.Number(label="Batch size", value=4, step=1, elem_id="batch-size", min_width=110),
            gr.Number(label="Max new tokens", value=64, step=1, elem_id="max-new-tokens", min_width=110),
            gr.Number(label="Temperature", value=0.7, step=0.1, elem_id="temperature", min_width=110),
            gr.Number(label="Seed", value=0, step=1, elem_id="seed", min_width=110),
        ]
    gr.Markdown(
        f"Up to {limits.max_batch} sequences of {limits.max_new_tokens} tokens. "
        "At temperature 0 the sequences of a batch are the same.",
        elem_id="limits",
    )
    with gr.Row(elem_id="buttons"):
        run = gr.Button("Run", variant="primary", elem_id="run", min_width=110, scale=2)
        stop = gr.Button("Stop", elem_id="stop", min_width=80, scale=1)
    return [prompt, *numbers], run, stop


def _bind(
    events: Events, settings: list[Any], run: gr.Button, stop: gr.Button, feeds: list[gr.HTML], status: Any
) -> None:
    race = run.click(
        events.run,
        inputs=settings,
        outputs=[*feeds, status, run],
        trigger_mode="once",
        show_progress="hidden",
        api_visibility="private",
        **DEVICE,
    )
    # A full queue or a server that went away: no generator is there to say so.
    race.failure(None, None, [status, run], js=_FAILED)
    stop.click(
        events.stop,
        outputs=[status, run],
        cancels=[race],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    gr.api(events.api, api_name="race", **DEVICE)
