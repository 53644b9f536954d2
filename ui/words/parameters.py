"""What `/race` says of its parameters: in Gradio's "Use via API" and in /gradio_api/info.

Contract: made from the table of settings, so a new setting is described by its own label, line and values; its
`script` adds what only a script has to know. Non-goals: the types and defaults, which Gradio reads from the
signature (request.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ui.page.choices import Choices
from ui.page.limits import MAX_DRAFT_LENGTH, Limits
from ui.page.setting import SETTINGS, Setting, Words


def describe_parameters(parameters: Iterable[Any], limits: Limits, choices: Choices) -> None:
    """Give the components behind the parameters, made in the table's order, their labels and words."""
    for setting, component in zip(SETTINGS.values(), parameters, strict=True):
        words = about(setting, limits, choices)
        component.label = setting.label or setting.name.replace("_", " ").capitalize()
        # Gradio shows the one beside the parameter; the other is JSON schema's own.
        component._api_info |= {"additional_description": words, "description": words}


def about(setting: Setting, limits: Limits, choices: Choices) -> str:
    """A setting in sentences: what it is, what it takes, its bounds."""

    def said(words: Words) -> str:
        return words(limits, choices) if callable(words) else words

    parts = [said(setting.explain), said(setting.script)]
    if setting.choices is not None:
        named = [(label, value) for label, value in setting.choices(choices) if not value.isdecimal()]
        listed = [f"{value!r} ({label.removeprefix(f'{value}: ')})" for label, value in named]
        if len(named) < len(setting.choices(choices)):
            listed.append(f"or a whole number from 1 to {MAX_DRAFT_LENGTH}")
        parts.append(f"Values: {'; '.join(listed)}")
    return " ".join(_sentence(part) for part in parts if part)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + ("" if words.endswith((".", "!")) else ".")
