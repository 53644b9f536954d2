"""The form: a control for every setting that has one, with a line that explains it.

Contract: made from the table of settings, in its order. Number fields have no bounds, so that every refusal is a
sentence of limits.py. The id of a control's element is the setting's name with dashes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import gradio as gr

from ui.page import prompt_length
from ui.page.choices import Choices
from ui.page.examples import examples
from ui.page.limits import Limits
from ui.page.prompt_length import Count
from ui.page.setting import Setting, shown

Fields = dict[str, gr.components.Component]


@dataclass(frozen=True)
class Form:
    """The components that the page's events need; `fields` is keyed by setting, in the order of the table."""

    fields: Fields
    run: gr.Button
    stop: gr.Button


def form(
    limits: Limits,
    choices: Choices,
    status: gr.HTML,
    *,
    count: Count | None = None,
    recording: bool = False,
) -> Form:
    """Build the settings in the current layout; for a recording, the buttons alone.

    `count` says how long a prompt is, see prompt_length.py; None leaves that line out. `status` goes right below
    the buttons, so that a refusal is in sight above long settings.
    """
    if recording:
        run, stop = _buttons("Play")
        status.render()
        return Form({}, run, stop)
    fields = _section("prompt", limits, choices)
    counted = prompt_length.counter(count) if count else None
    offered = gr.Row(elem_id="examples")
    fields |= _section("numbers", limits, choices)
    run, stop = _buttons("Run")
    status.render()
    with gr.Accordion("More settings", open=False, elem_id="more-settings"):
        fields |= _section("more", limits, choices)
    if counted:
        fields["prompt"].change(None, None, None, js=prompt_length.CHANGED)  # type: ignore[attr-defined]
    with offered:
        for name, values in examples().items():
            button = gr.Button(name, size="sm", min_width=60)
            script = f"() => {json.dumps([_within(limits, *one) for one in values.items()])}"
            button.click(None, None, [fields[one] for one in values], js=script, show_progress="hidden")
    return Form({setting.name: fields[setting.name] for setting in shown()}, run, stop)


def _within(limits: Limits, name: str, value: Any) -> Any:
    """An example's value, cut to what the operator allows of rows and tokens."""
    most = {"batch_size": limits.max_batch, "max_new_tokens": limits.max_new_tokens}.get(name)
    return value if most is None else min(value, most)


def _buttons(start: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row(elem_id="buttons"):
        run = gr.Button(start, variant="primary", elem_id="run", min_width=110, scale=2)
        return run, gr.Button("Stop", elem_id="stop", min_width=80, scale=1)


def _section(name: str, limits: Limits, choices: Choices) -> Fields:
    """The controls of one section; neighbouring settings with `beside` share a row."""
    fields: Fields = {}

    def make(setting: Setting) -> None:
        words = setting.explain(limits, choices) if callable(setting.explain) else setting.explain
        offered = list(setting.choices(choices)) if setting.choices else []
        fields[setting.name] = CONTROLS[setting.control](setting, words or None, offered)

    settings = [setting for setting in shown() if setting.section == name]
    for beside, neighbours in groupby(settings, lambda setting: setting.beside):
        if beside:
            with gr.Row():
                for setting in neighbours:
                    make(setting)
        else:
            for setting in neighbours:
                make(setting)
    return fields


def _common(setting: Setting, words: str | None) -> dict[str, Any]:
    value = setting.default if setting.start is None else setting.start
    elem_id = setting.name.replace("_", "-")
    return {"label": setting.label, "value": value, "elem_id": elem_id, "info": words}


def _text(setting: Setting, words: str | None, offered: list[tuple[str, str]]) -> gr.Textbox:
    return gr.Textbox(**_common(setting, words), lines=4, max_lines=10, autofocus=False)


def _number(setting: Setting, words: str | None, offered: list[tuple[str, str]]) -> gr.Number:
    shape: dict[str, Any] = {"step": setting.step, "min_width": 110, "placeholder": setting.placeholder}
    return gr.Number(**_common(setting, words), **shape)


def _list(setting: Setting, words: str | None, offered: list[tuple[str, str]]) -> gr.Dropdown:
    return gr.Dropdown(**_common(setting, words) | {"value": offered[0][1]}, choices=offered, filterable=False)


def _boxes(setting: Setting, words: str | None, offered: list[tuple[str, str]]) -> gr.CheckboxGroup:
    common = _common(setting, words)
    return gr.CheckboxGroup(**common | {"value": list(common["value"])}, choices=offered)


CONTROLS: dict[str, Callable[..., gr.components.Component]] = {
    "text": _text,
    "number": _number,
    "list": _list,
    "boxes": _boxes,
}


def restore_script(form: Form) -> str:
    """JavaScript for Blocks.load(js=) that fills the fields from the page's address."""
    allowed: dict[str, Any] = {}
    for setting in shown():
        values = getattr(form.fields[setting.name], "choices", None)
        offered = [value for _, value in values] if values else None
        allowed[setting.name] = {"control": setting.control, "choices": offered}
    # The page's scripts may load after this runs.
    wait = "while (!window.Bass?.restore) await new Promise((go) => setTimeout(go, 30));"
    return f"async (...now) => {{ {wait} return Bass.restore({json.dumps(allowed)}, now); }}"
