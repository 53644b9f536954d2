"""The tab "Sweep": the visitor's own measurements, and predictions. Call `panel`.

The HTML is static. sweep.js draws the states that SweepEvents yields.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from ui.page import assets
from ui.page.events import FAILED
from ui.page.form import Form

from .events import SweepEvents
from .predicted import MACHINES, MODELS
from .request import FIXED, MAX_PROMPTS

# What "Measure" does. A page without a model can't measure.
ABOUT_MEASURING = """<header class="sweep-head"><p>"Measure" races BASS against Regular for about a minute: at
batch 1, 2, 4 and 8 on the prompt of the tab "Race", or at its batch size on your own prompts.</p></header>"""
OWN_PROMPTS = "2 to {most} prompts, one per line. Separate prompts of several lines by blank lines."
ABOUT = {
    "measured": (
        "This machine",
        "measured here",
        "A point: ms per token of regular decoding / ms per token of BASS, in races of the two. Bars: two "
        "standard errors, estimated from the scatter of the rounds.",
    ),
    "predicted": (
        "Another machine",
        "predicted",
        "No model runs. Step times come from a datasheet's bandwidth and FLOP/s. Rounds are simulated with "
        "the real policies.",
    ),
}
TITLE = "Speed-up over regular decoding"
# Fills an empty acceptance with the last measured one, and adds its origin.
WITH_ACCEPTANCE = "(...values) => Bass.withAcceptance(values)"


def panel(events: SweepEvents | None, form: Form, device: dict[str, Any]) -> None:
    """Build and bind the tab's content in the current layout.

    Args:
        events: None for a page without a model, which cannot measure.
        device: the concurrency settings of events that use the device.
    """
    if events is not None:
        gr.HTML(html_template=ABOUT_MEASURING, apply_default_css=False)
    with gr.Row(elem_id="sweep"):
        with gr.Column(min_width=280):
            with gr.Row(elem_classes="sweep-fields"):
                label = "Fixed draft length" if events is None else "Fixed draft length, in both figures"
                fixed = gr.Number(FIXED, label=label, elem_id="sweep-fixed", step=1)
            if events is not None:
                own = gr.Textbox(
                    label="Will it help on my prompts?",
                    info=OWN_PROMPTS.format(most=MAX_PROMPTS),
                    placeholder='Empty: the prompt of the tab "Race".',
                    elem_id="sweep-prompts",
                    lines=3,
                    max_lines=8,
                )
                with gr.Row(elem_classes="sweep-buttons"):
                    measure = gr.Button(
                        "Measure", variant="primary", elem_id="sweep-measure", min_width=110, scale=2
                    )
                    stop = gr.Button("Stop", elem_id="sweep-stop", min_width=80)
                measured = _figure("measured")
                running = measure.click(
                    events.measure,
                    inputs=[fixed, own, *form.fields.values()],
                    outputs=[measured, measure],
                    trigger_mode="once",
                    show_progress="minimal",
                    show_progress_on=measured,
                    api_visibility="private",
                    **device,
                )
                running.failure(None, None, [measured, measure], js=FAILED)
                stop.click(None, None, None, cancels=[running], api_visibility="private")
        with gr.Column(min_width=280):
            with gr.Row(elem_classes="sweep-fields"):
                machine, models = _list("Machine", MACHINES, 2), _list("Models", MODELS, 3)
                acceptance = gr.Textbox(
                    label="Acceptance", elem_id="sweep-acceptance", placeholder="measured, or 0.8",
                    min_width=120, scale=2, max_lines=1,
                )  # fmt: skip
            origin = gr.Textbox(visible=False)
            with gr.Row(elem_classes="sweep-buttons"):
                predict = gr.Button("Predict", variant="primary", elem_id="sweep-predict", min_width=110)
            # A prediction runs no model, so it has a separate queue and doesn't wait for a race.
            gr.on(
                [predict.click, machine.input, models.input],
                SweepEvents.predict,
                inputs=[fixed, machine, models, acceptance, origin],
                outputs=_figure("predicted"),
                js=WITH_ACCEPTANCE,
                show_progress="hidden",
                api_visibility="private",
                concurrency_limit=1,
                concurrency_id="predictions",
            )


def _list(label: str, choices: tuple[tuple[str, str], ...], scale: int) -> gr.Dropdown:
    name, first = f"sweep-{label.lower()}", choices[0][1]
    return gr.Dropdown(
        choices, value=first, label=label, elem_id=name, filterable=False, min_width=120, scale=scale
    )


def _figure(kind: str) -> gr.HTML:
    return assets.part(template(kind), "Bass.mountSweep(element, props, watch)", f"sweep-{kind}")


def template(kind: str) -> str:
    """Return the HTML of one figure with its sentences, its table and its exports."""
    title, badge, about = ABOUT[kind]
    mark = f'<span class="badge-{kind}">{badge}</span>'
    return f"""<section class="bass-sweep part" data-kind="{kind}" aria-labelledby="sweep-{kind}-title">
<h2 class="spoken" id="sweep-{kind}-title">{title}, {badge}</h2>
<p class="sweep-line message" role="status" aria-live="polite"></p>
<progress class="sweep-bar" max="1" value="0" aria-label="Progress of the sweep" hidden></progress>
<div class="sweep-results" hidden><ul class="sweep-said" aria-live="polite"></ul><p class="part-about">{about}</p>
<figure class="chart"><figcaption><h3>{TITLE} {mark}</h3><span class="sweep-of">by batch size</span>
</figcaption><div class="plot" role="group" aria-label="{TITLE} by batch size, {badge}"></div></figure>
<details class="sweep-assumed" hidden><summary>What this assumes</summary><ul></ul></details>
<div class="table-scroll" tabindex="0" role="group" aria-label="Figures of the sweep, {badge}">
<table class="figures-table"><caption class="spoken">Figures of the sweep, {badge}, one row per point</caption>
<thead></thead><tbody></tbody></table></div>
<div class="take"><button type="button" class="action" data-take="json">Download JSON</button>
<button type="button" class="action" data-take="csv">Download CSV</button></div></div></section>"""
