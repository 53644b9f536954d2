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
from ui.page.limits import Limits
from ui.page.presets import FIRST, Preset, filled, presets
from ui.page.setting import Setting, shown
from ui.sources.count import Count

Fields = dict[str, gr.components.Component]

# For predicted.css, which hides what does not apply to the chosen clock.
_APPLIES = "(clock, models) => { Object.assign(document.body.dataset, { clock, clockModels: models }); }"


@dataclass(frozen=True)
class Form:
    """The components that the page's events need; `fields` is keyed by setting, in the table's order."""

    fields: Fields
    run: gr.Button
    stop: gr.Button
    note: gr.HTML | None = None


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
    offered, note = gr.Row(elem_id="presets"), _note()
    fields |= _section("numbers", limits, choices)
    run, stop = _buttons("Run")
    status.render()
    with gr.Accordion("Another machine", open=False, elem_id="another-machine"):
        fields |= _section("machine", limits, choices)
    with gr.Accordion("More settings", open=False, elem_id="more-settings"):
        fields |= _section("more", limits, choices)
    if counted:
        for name in ("prompt", "prompts"):
            fields[name].change(None, None, None, js=prompt_length.CHANGED)  # type: ignore[attr-defined]
    chosen = [fields[name] for name in ("clock", "clock_models")]
    for field in chosen:
        field.change(None, chosen, None, js=_APPLIES)  # type: ignore[attr-defined]
    fields = {setting.name: fields[setting.name] for setting in shown()}
    with offered:
        for name, preset in presets().items():
            values = list(starting(preset, limits, choices).values())
            gr.Button(name, size="sm", min_width=60).click(
                None, None, [*fields.values(), note],
                js=f"() => {json.dumps([*values, preset.look_for])}", show_progress="hidden",
            )  # fmt: skip
    names = json.dumps(list(fields))
    changes = [field.change for field in fields.values()]  # type: ignore[attr-defined]
    gr.on(
        changes, None, list(fields.values()), js=f"(...now) => Bass.form?.({names}, now)", show_progress="hidden"
    )
    # The sentence is true of the preset alone: once a person changes it, it goes.
    typed = [field.input for field in fields.values()]  # type: ignore[attr-defined]
    gr.on(typed, None, None, note, js="() => ''", show_progress="hidden")
    return Form(fields, run, stop, note)


def starting(preset: Preset, limits: Limits, choices: Choices) -> dict[str, Any]:
    """What a preset fills in: a value for every setting of the form, in the table's order.

    Where a list does not offer a preset's value, the setting has its neutral one.
    """
    neutral = {setting.name: _neutral(setting, choices) for setting in shown()}
    lists = {
        setting.name: setting.choices(choices)
        for setting in shown()
        if setting.control == "list" and setting.choices
    }

    def cut(name: str, value: Any) -> Any:
        offered = [known for _, known in lists[name]] if name in lists else [value]
        return _within(limits, name, value) if value in offered else neutral[name]

    return filled(preset, neutral, cut)


def _neutral(setting: Setting, choices: Choices) -> Any:
    """What a preset gives a setting that it does not name; a list has its first value, the operator's choice."""
    if setting.control == "list" and setting.choices:
        return setting.choices(choices)[0][1]
    value = setting.default if setting.start is None else setting.start
    return list(value) if isinstance(value, tuple) else value


def _note() -> gr.HTML:
    return gr.HTML(presets()[FIRST].look_for, elem_id="preset-note", apply_default_css=False)


def _within(limits: Limits, name: str, value: Any) -> Any:
    """A preset's value, cut to what the operator allows of rows and tokens."""
    most = {"batch_size": limits.max_batch, "max_new_tokens": limits.max_new_tokens}.get(name)
    return value if most is None else min(value, most)


def _buttons(start: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row(elem_id="buttons"):
        run = gr.Button(start, variant="primary", elem_id="run", min_width=110, scale=2)
        return run, gr.Button("Stop", elem_id="stop", min_width=80, scale=1)


def _section(name: str, limits: Limits, choices: Choices) -> Fields:
    """The controls of one section; neighbouring settings with `beside` share a row."""
    fields: Fields = {}
    starts = starting(presets()[FIRST], limits, choices)

    def make(setting: Setting) -> None:
        words = setting.explain(limits, choices) if callable(setting.explain) else setting.explain
        offered = list(setting.choices(choices)) if setting.choices else []
        fields[setting.name] = CONTROLS[setting.control](setting, starts[setting.name], words or None, offered)

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


def _common(setting: Setting, value: Any, words: str | None) -> dict[str, Any]:
    elem_id = setting.name.replace("_", "-")
    return {"label": setting.label, "value": value, "elem_id": elem_id, "info": words}


def _text(setting: Setting, value: Any, words: str | None, offered: list[tuple[str, str]]) -> gr.Textbox:
    return gr.Textbox(**_common(setting, value, words), lines=4, max_lines=10, autofocus=False)


def _number(setting: Setting, value: Any, words: str | None, offered: list[tuple[str, str]]) -> gr.Number:
    shape: dict[str, Any] = {"step": setting.step, "min_width": 110, "placeholder": setting.placeholder}
    return gr.Number(**_common(setting, value, words), **shape)


def _list(setting: Setting, value: Any, words: str | None, offered: list[tuple[str, str]]) -> gr.Dropdown:
    return gr.Dropdown(**_common(setting, value, words), choices=offered, filterable=False)


def _boxes(setting: Setting, value: Any, words: str | None, offered: list[tuple[str, str]]) -> gr.CheckboxGroup:
    return gr.CheckboxGroup(**_common(setting, value, words), choices=offered)


CONTROLS: dict[str, Callable[..., gr.components.Component]] = {
    "text": _text,
    "number": _number,
    "list": _list,
    "boxes": _boxes,
}


# The page's scripts may load after the page's own.
WAIT = "while (!window.Bass?.restore) await new Promise((go) => setTimeout(go, 30));"
# A link, or a race that a reload ended, has settings of its own, of which the first preset's sentence is not true.
NOTE = f"async (now) => {{ {WAIT} return Bass.ended || location.hash.startsWith('#race?') ? '' : now; }}"


def restore_script(form: Form) -> str:
    """JavaScript for Blocks.load(js=) that fills the fields from the page's address, or as before a reload."""
    allowed: dict[str, Any] = {}
    for setting in shown():
        values = getattr(form.fields[setting.name], "choices", None)
        offered = [value for _, value in values] if values else None
        allowed[setting.name] = {"control": setting.control, "choices": offered}
    values = f"const allowed = {json.dumps(allowed)}, values = Bass.askedBefore(Bass.restore(allowed, now));"
    return f"async (...now) => {{ {WAIT} {values} Bass.form(Object.keys(allowed), values); return values; }}"
