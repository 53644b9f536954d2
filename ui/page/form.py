"""The form: a control for every setting that has one, with a line that explains it. Call `form`.

The controls come from the table of settings, in its order. The DOM id of a control is the setting's name with
dashes. Number fields have no bounds, so every refusal is a sentence from limits.py. A line below the prompt shows
its length (Count in ui/sources/source.py). ui/static/page/prompt.js decides when to ask for it.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import gradio as gr

from ui.page import assets
from ui.page.choices import Choices
from ui.page.limits import Limits
from ui.page.presets import QUESTIONS, Preset, presets
from ui.page.setting import SETTINGS, Setting, shown
from ui.sources.source import Count

Fields = dict[str, gr.components.Component]

# JavaScript for the prompt's change event, which presets and links trigger too.
_CHANGED = "() => window.Bass?.promptChanged?.()"
# race.css hides the fields that do not apply to the chosen clock.
_APPLIES = "(clock, models) => { Object.assign(document.body.dataset, { clock, clockModels: models }); }"
# An edited prompt gets the default draft length, unless the visitor has chosen one: the fixed length of a preset
# suits only its own text.
_CHOSEN = "() => { document.body.dataset.draftLength = 'chosen'; }"
_PRESET = (
    "() => { delete document.body.dataset.draftLength; delete document.body.dataset.prompt; return {values}; }"
)
# Gradio's event input misses text that comes in one piece, as from the clipboard. prompt.js marks edits.
_EDITED = (
    "(now, said) => document.body.dataset.prompt !== 'edited' ? [now, said] "
    ": [document.body.dataset.draftLength === 'chosen' ? now : {neutral}, '']"
)
# Shows the buttons of all presets.
_MORE = "() => { document.querySelector('#presets').classList.add('all'); }"


@dataclass(frozen=True)
class Form:
    """The components that the page's events need. `fields` has a component per setting, in the table's order."""

    fields: Fields
    run: gr.Button
    stop: gr.Button
    note: gr.HTML | None = None


def form(
    limits: Limits, choices: Choices, status: gr.HTML, *, count: Count | None = None, recording: bool = False
) -> Form:
    """Build the settings in the current layout.

    Args:
        choices: the entries of the lists.
        status: the status line. It goes right below the buttons, so that a refusal is visible above long settings.
        count: returns the length of a prompt. With None, the form has no line with that length.
        recording: build only the buttons, for a page that plays recordings.
    """
    if recording:
        run, stop = _buttons("Play")
        status.render()
        return Form({}, run, stop)
    # The button "Four questions" stays one for four, even if the first race has fewer of them.
    offered_presets = presets(None if choices.first.name == QUESTIONS else choices.first)
    fields = _section("prompt", limits, choices)
    if count:
        _counter(count)
    offered = gr.Row(elem_id="presets")
    with gr.Row(elem_id="start"):
        fields |= _section("numbers", limits, choices)
        run, stop = _buttons("Run")
        gr.Button("Will it help on my prompts?", size="sm", min_width=60, elem_id="own-prompts").click(
            None, None, None, js="() => Bass.askOwnPrompts()"
        )
    status.render()
    first = presets(choices.first)[choices.first.name]
    note = gr.HTML(first.look_for, elem_id="preset-note", apply_default_css=False)
    with gr.Accordion("More settings", open=False, elem_id="more-settings"):
        fields |= _section("more", limits, choices)
        with gr.Accordion("Another machine", open=False, elem_id="another-machine"):
            fields |= _section("machine", limits, choices)
    if count:
        for name in ("prompt", "prompts"):
            fields[name].change(None, None, None, js=_CHANGED)  # type: ignore[attr-defined]
    chosen = [fields[name] for name in ("clock", "clock_models")]
    for field in chosen:
        field.change(None, chosen, None, js=_APPLIES)  # type: ignore[attr-defined]
    length, neutral = fields["draft_length"], json.dumps(_neutral(SETTINGS["draft_length"], choices))
    length.input(None, None, None, js=_CHOSEN)  # type: ignore[attr-defined]
    fields["prompt"].change(  # type: ignore[attr-defined]
        None, [length, note], [length, note], js=_EDITED.replace("{neutral}", neutral), show_progress="hidden"
    )
    fields = {setting.name: fields[setting.name] for setting in shown()}
    with offered:
        for name, preset in offered_presets.items():
            values = list(starting_values(preset, limits, choices).values())
            gr.Button(name, size="sm", min_width=60, elem_classes="more" if preset.more else None).click(
                None, None, [*fields.values(), note],
                js=_PRESET.replace("{values}", json.dumps([*values, preset.look_for])), show_progress="hidden",
            )  # fmt: skip
        gr.Button("More", size="sm", min_width=60, elem_id="more-presets").click(None, None, None, js=_MORE)
    names = json.dumps(list(fields))
    changes = [field.change for field in fields.values()]  # type: ignore[attr-defined]
    gr.on(
        changes, None, list(fields.values()), js=f"(...now) => Bass.form?.({names}, now)", show_progress="hidden"
    )
    # The sentence describes the preset: clear it as soon as somebody changes a setting.
    typed = [field.input for field in fields.values()]  # type: ignore[attr-defined]
    gr.on(typed, None, None, note, js="() => ''", show_progress="hidden")
    return Form(fields, run, stop, note)


def _counter(count: Count) -> None:
    """Add the line with the prompt's length in tokens to the current layout."""

    # A new function each time, because Gradio sets attributes on it.
    def prompt_tokens(question: Any) -> str:
        prompt, by_line = question if isinstance(question, list) and len(question) == 2 else (question, False)
        return count(prompt, by_line is True)

    line = '<p class="prompt-length" role="status"></p>'
    script = "Bass.mountPromptLength(element, server)"
    assets.part(line, script, "prompt-length", server_functions=[prompt_tokens])


def starting_values(preset: Preset, limits: Limits, choices: Choices) -> dict[str, Any]:
    """Return the values that a preset fills in, one for every setting of the form, in the table's order.

    A setting that the preset does not name gets its neutral value, and so does a list that does not offer the
    preset's value. Rows and tokens are cut to the operator's limits.
    """
    caps = {"batch_size": limits.max_batch, "max_new_tokens": limits.max_new_tokens}
    values: dict[str, Any] = {}
    for setting in shown():
        neutral = _neutral(setting, choices)
        value = preset.values.get(setting.name, neutral)
        if setting.control == "list" and setting.choices:
            value = value if value in [known for _, known in setting.choices(choices)] else neutral
        values[setting.name] = min(value, caps[setting.name]) if setting.name in caps else value
    if values["prompts"] == "lines":
        values["prompt"] = "\n".join(values["prompt"].split("\n")[: values["batch_size"]])
    return values


def _neutral(setting: Setting, choices: Choices) -> Any:
    """Return a setting's value for presets that don't name the setting. The value of a list is its first entry."""
    if setting.control == "list" and setting.choices:
        return setting.choices(choices)[0][1]
    value = setting.default if setting.start is None else setting.start
    return list(value) if isinstance(value, tuple) else value


def _buttons(start: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row(elem_id="buttons"):
        run = gr.Button(start, variant="primary", elem_id="run", min_width=60, scale=2)
        return run, gr.Button("Stop", elem_id="stop", min_width=50, scale=1)


def _section(name: str, limits: Limits, choices: Choices) -> Fields:
    """Build the controls of one section. Neighbouring settings with `shares_row` share a row."""
    fields: Fields = {}
    starts = starting_values(presets(choices.first)[choices.first.name], limits, choices)
    settings = [setting for setting in shown() if setting.section == name]
    for shares_row, neighbours in groupby(settings, lambda setting: setting.shares_row):
        with gr.Row() if shares_row else nullcontext():
            for setting in neighbours:
                fields[setting.name] = _control(setting, starts[setting.name], limits, choices)
    return fields


def _control(setting: Setting, value: Any, limits: Limits, choices: Choices) -> gr.components.Component:
    words = setting.explain(limits, choices) if callable(setting.explain) else setting.explain
    common: dict[str, Any] = {"label": setting.label, "value": value, "info": words or None}
    common["elem_id"] = setting.name.replace("_", "-")
    offered = list(setting.choices(choices)) if setting.choices else []
    if setting.control == "text":
        return gr.Textbox(**common, lines=3, max_lines=3, autofocus=False)
    if setting.control == "number":
        return gr.Number(**common, step=setting.step, min_width=110, placeholder=setting.placeholder)
    if setting.control == "list":
        return gr.Dropdown(**common, choices=offered, filterable=False)
    return gr.CheckboxGroup(**common, choices=offered)


# Gradio's events may fire before the page's scripts have been loaded.
WAIT = "while (!window.Bass?.restore) await new Promise((go) => setTimeout(go, 30));"
# Clears the first preset's sentence if a link, or a race that a reload ended, brings other settings.
NOTE = f"async (now) => {{ {WAIT} return Bass.ended || location.hash.startsWith('#race?') ? '' : now; }}"


def restore_script(form: Form) -> str:
    """Return JavaScript for Blocks.load(js=) that restores the fields from the address or after a reload."""
    allowed: dict[str, Any] = {}
    for setting in shown():
        values = getattr(form.fields[setting.name], "choices", None)
        offered = [value for _, value in values] if values else None
        allowed[setting.name] = {"control": setting.control, "choices": offered}
    values = f"const allowed = {json.dumps(allowed)}, values = Bass.askedBefore(Bass.restore(allowed, now));"
    at = list(allowed).index("draft_length")
    told = f"if (values[{at}] !== now[{at}]) ({_CHOSEN})(); Bass.form(Object.keys(allowed), values);"
    return f"async (...now) => {{ {WAIT} {values} {told} return values; }}"
