"""Contract: the form: every setting of a race with a line that explains it, in the order of `FIELDS`.

Numbers carry no bounds here, so that every refusal is one of our own sentences (limits.py). Element ids are the
field's name with dashes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ui.page.choices import Choices
from ui.page.limits import LANES, Limits, RaceRequest

# The pair is a script's to name: the page races the operator's own.
FIELDS = tuple(name for name in RaceRequest.__dataclass_fields__ if name != "pair")
EXAMPLES = {
    "Code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "Prose": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Question": "Why is the sky blue? Explain it to a ten-year-old.",
    "Rewriting": (
        "Repeat the following text word for word:\n\n"
        "The tide came in slowly over the flat sand. The children ran ahead of the tide and the dog ran after "
        "the children, and when the tide turned, the children turned, and the dog turned with them."
    ),
    # Sets the temperature as well: what nobody can guess, a draft can't either.
    "Losing": "List forty unrelated words, each from another language.",
}
LOSING_TEMPERATURE = 1.5


@dataclass(frozen=True)
class Form:
    """The components that the page's events need."""

    fields: list[gr.components.Component]
    run: gr.Button
    stop: gr.Button


def form(limits: Limits, choices: Choices, status: gr.HTML, *, recording: bool = False) -> Form:
    """Build the settings where this is called; a recording has settled them, so then only the buttons show.

    `status` is placed right below the buttons, so that a refusal is in sight however long the settings are.
    """
    if recording:
        run, stop = _buttons("Play")
        status.render()
        return Form([], run, stop)
    prompt = gr.Textbox(
        label="Prompt", value=EXAMPLES["Code"], lines=4, max_lines=10, elem_id="prompt", autofocus=False
    )
    examples = gr.Row(elem_id="examples")
    with gr.Row(elem_id="numbers"):
        batch = _number("Batch size", 4, "batch-size", f"sequences, 1 to {limits.max_batch}")
        tokens = _number("Max new tokens", 64, "max-new-tokens", f"per sequence, to {limits.max_new_tokens}")
        temperature = _number("Temperature", 0.7, "temperature", "0: the likeliest", step=0.1)
        seed = _number("Seed", 0, "seed", "same seed, same text")
    run, stop = _buttons("Run")
    status.render()
    with gr.Accordion("More settings", open=False, elem_id="more-settings"):
        more = _more(choices)
    with examples:
        for name, text in EXAMPLES.items():
            button = gr.Button(name, size="sm", min_width=60)
            script = f"() => {json.dumps([text, LOSING_TEMPERATURE] if name == 'Losing' else text)}"
            filled = [prompt, temperature] if name == "Losing" else prompt
            button.click(None, None, filled, js=script, show_progress="hidden")
    return Form([prompt, batch, tokens, temperature, seed, *more], run, stop)


def _buttons(start: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row(elem_id="buttons"):
        run = gr.Button(start, variant="primary", elem_id="run", min_width=110, scale=2)
        return run, gr.Button("Stop", elem_id="stop", min_width=80, scale=1)


def _number(
    label: str, value: float | None, elem_id: str, info: str, step: float = 1, placeholder: str | None = None
) -> gr.Number:
    return gr.Number(
        label=label, value=value, elem_id=elem_id, info=info, step=step, min_width=110, placeholder=placeholder
    )


def _pick(label: str, choices: tuple[tuple[str, str], ...], elem_id: str, info: str) -> gr.Dropdown:
    return gr.Dropdown(
        list(choices), value=choices[0][1], label=label, elem_id=elem_id, info=info, filterable=False
    )


def _more(choices: Choices) -> list[gr.components.Component]:
    """Everything after the seed, in the order of FIELDS."""
    with gr.Row():
        top_k = _number("Top-k", 0, "top-k", "only the k likeliest; 0: all")
        top_p = _number("Top-p", 1.0, "top-p", "only the likeliest that reach p", step=0.05)
    return [
        top_k,
        top_p,
        _pick(
            "Draft length",
            choices.draft_lengths,
            "draft-length",
            "How many tokens to guess before the target checks them.",
        ),
        _pick("Drafter", choices.drafters, "drafter", "Who guesses. A bad guess costs time, never quality."),
        _pick("Attention", choices.attentions, "attention", "How rows of different lengths are attended."),
        _pick("Scheduling", choices.schedulings, "scheduling", "How the lanes share the one device."),
        _pick(
            "Verification",
            choices.verifications,
            "verification",
            choices.verification,
        ),
        _number(
            "Time budget, ms",
            None,
            "time-budget-ms",
            "Each lane stops at this time on its own clock; empty: no budget.",
            step=500,
            placeholder="none",
        ),
        gr.CheckboxGroup(
            list(choices.lanes), value=list(LANES), label="Lanes", elem_id="lanes", info="Who takes part."
        ),
    ]


def restore_script(form: Form) -> str:
    """JavaScript that gives every field its value from the address, or leaves it: for Blocks.load(js=)."""
    allowed: dict[str, Any] = {}
    for name, field in zip(FIELDS, form.fields, strict=True):
        values = getattr(field, "choices", None)
        kind = "number" if isinstance(field, gr.Number) else "list" if name == "lanes" else "text"
        allowed[name] = {"kind": kind, "choices": [value for _, value in values] if values else None}
    # The page's scripts may come later than this.
    wait = "while (!window.Bass?.restore) await new Promise((go) => setTimeout(go, 30));"
    return f"async (...now) => {{ {wait} return Bass.restore({json.dumps(allowed)}, now); }}"
