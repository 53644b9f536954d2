"""The tab "Sweep": its controls, and one figure for what was measured and one for what is predicted.

Contract: static HTML, in which sweep.js draws the states that SweepEvents yields. What is predicted has a
figure of its own, which wears the badge "predicted". Non-goals: how a sweep is measured or predicted.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from ui.page import assets
from ui.page.events import FAILED
from ui.page.form import Form

from .events import SweepEvents
from .predicted import MACHINES, MODELS
from .request import FIXED, MOST_PROMPTS

HEADING = "Where does speculation pay?"
HEAD = """<p>"Measure" races BASS against regular decoding for about a minute, with the settings of the tab "Race":
at batch 1, 2, 4 and 8 on its prompt, or at its batch on prompts of your own.</p>"""
RECORDED = "<p>No model is loaded here, so nothing can be measured; predictions need none.</p>"
OWN = "One a line, 2 to {most}; with blank lines between them, each may have several lines."
ABOUT = {
    "measured": (
        "This machine",
        "measured here",
        "A point: ms per token of regular decoding / that of BASS, in races of the two. Bars: two standard "
        "errors, from the scatter of the rounds.",
    ),
    "predicted": (
        "Another machine",
        "predicted",
        "No model runs. Step times come from a datasheet's bandwidth and FLOP/s, and rounds are simulated with "
        "the real policies.",
    ),
}
TITLE = "Speed-up over regular decoding"
# Fills in an acceptance that was left empty with what was measured last, and says where it is from.
WITH_ACCEPTANCE = "(...values) => Bass.withAcceptance(values)"


def panel(events: SweepEvents | None, form: Form, device: dict[str, Any]) -> None:
    """Build and bind the tab's content in the current layout.

    events: None for a recording, which has nothing to measure. form: the race's settings.
    device: the part of the queue that has the device.
    """
    head = RECORDED if events is None else HEAD
    title = f'<header class="sweep-head"><h2>{HEADING}</h2>{head}</header>'
    gr.HTML(html_template=title, apply_default_css=False)
    with gr.Row(elem_id="sweep"):
        with gr.Column(min_width=280):
            with gr.Row(elem_classes="sweep-fields"):
                label = "Fixed draft length" if events is None else "Fixed draft length, in both figures"
                fixed = gr.Number(FIXED, label=label, elem_id="sweep-fixed", step=1)
            if events is not None:
                own = gr.Textbox(
                    label="Will it help on my prompts?",
                    info=OWN.format(most=MOST_PROMPTS),
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
                    label="Acceptance", elem_id="sweep-acceptance", placeholder="last measured, or 0.8",
                    min_width=120, scale=2, max_lines=1,
                )  # fmt: skip
            origin = gr.Textbox(visible=False)
            with gr.Row(elem_classes="sweep-buttons"):
                predict = gr.Button("Predict", variant="primary", elem_id="sweep-predict", min_width=110)
            # In the device's part too: on a CPU, half a second of work would disturb the times of a race.
            gr.on(
                [predict.click, machine.input, models.input],
                SweepEvents.predict,
                inputs=[fixed, machine, models, acceptance, origin],
                outputs=_figure("predicted"),
                js=WITH_ACCEPTANCE,
                show_progress="hidden",
                api_visibility="private",
                **device,
            )


def _list(label: str, choices: tuple[tuple[str, str], ...], scale: int) -> gr.Dropdown:
    name, first = f"sweep-{label.lower()}", choices[0][1]
    return gr.Dropdown(
        choices, value=first, label=label, elem_id=name, filterable=False, min_width=120, scale=scale
    )


def _figure(kind: str) -> gr.HTML:
    return assets.part(template(kind), "Bass.mountSweep(element, props, watch)", f"sweep-{kind}")


def template(kind: str) -> str:
    """One figure with its sentences, its table and its exports."""
    title, badge, about = ABOUT[kind]
    mark = f'<span class="badge-{kind}">{badge}</span>'
    return f"""<section class="bass-sweep part" data-kind="{kind}" aria-labelledby="sweep-{kind}-title">
<div class="part-head"><h2 id="sweep-{kind}-title">{title}</h2>{mark}</div>
<p class="part-about">{about}</p>
<p class="sweep-line message" role="status" aria-live="polite"></p>
<progress class="sweep-bar" max="1" value="0" aria-label="Part of the sweep that is done" hidden></progress>
<figure class="chart"><figcaption><h3>{TITLE} {mark}</h3><span class="sweep-of">over the batch size</span>
</figcaption><div class="plot" role="group" aria-label="{TITLE} over the batch size, {badge}"></div></figure>
<ul class="sweep-said" aria-live="polite"></ul>
<details class="sweep-assumed" hidden><summary>What this assumes</summary><ul></ul></details>
<div class="sweep-results" hidden>
<div class="table-scroll" tabindex="0" role="group" aria-label="Figures of the sweep, {badge}">
<table class="figures-table"><caption class="spoken">Figures of the sweep, {badge}, a row a point</caption>
<thead></thead><tbody></tbody></table></div>
<div class="take"><button type="button" class="action" data-take="json">Download JSON</button>
<button type="button" class="action" data-take="csv">Download CSV</button></div></div></section>"""
