"""A race as the page or a script may ask for it, made from the table of settings.

Contract: `make_request` checks what a form or a script sent. The request is plain data, so that it can be pickled,
and holds no more than the settings' values. Raises RequestError, one sentence that says what to change. What
`/race` says of its parameters, in Gradio's "Use via API" and in /gradio_api/info, is made from the same table;
Gradio reads their types and defaults from the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from bass_core import SamplingParams
from ui.page import clock
from ui.page.choices import Choices
from ui.page.limits import MAX_DRAFT_LENGTH, Limits, lines
from ui.page.setting import SETTINGS, Setting, Words

SAMPLING = "sampling."


class RaceRequest(SimpleNamespace):
    """One race: an attribute for each setting, named as in `/race`. `pair` "" is the operator's own."""

    def settings(self) -> dict[str, Any]:
        """The settings by name, JSON-ready."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of bass_core's `race`."""
        given: dict[str, Any] = {"inspect": True}
        sampling: dict[str, Any] = {}
        for name, keyword in keywords().items():
            if keyword.startswith(SAMPLING):
                sampling[keyword.removeprefix(SAMPLING)] = getattr(self, name)
            elif keyword:
                given[keyword] = getattr(self, name)
        if self.prompts == "lines":
            given["prompt"] = lines(self.prompt, Limits(max_batch=self.batch_size))
        predicted = clock.clock(vars(self))
        return given | {"sampling": SamplingParams(**sampling)} | ({"clock": predicted} if predicted else {})


def make_request(given: Mapping[str, Any], limits: Limits) -> RaceRequest:
    """The request for these settings; one that is missing has its default.

    With one prompt a line, the batch size is the number of lines.
    """
    values = {
        name: setting.check(setting.label, given.get(name, setting.default), limits)
        for name, setting in SETTINGS.items()
    }
    if values["prompts"] == "lines":
        values["batch_size"] = len(lines(values["prompt"], limits))
    clock.clock(values)  # refuses what it can't predict for
    return RaceRequest(**values)


def keywords() -> dict[str, str]:
    """Each setting's keyword of bass_core's `race`: "sampling.x" for a field of SamplingParams, "" for none."""
    return {name: setting.argument for name, setting in SETTINGS.items()}


def defaults() -> dict[str, Any]:
    """The parameters of `/race` with their defaults, in their order."""
    return {name: setting.default for name, setting in SETTINGS.items()}


def describe(function: Callable[..., Any], returns: object) -> inspect.Signature:
    """Give a function with *args or **kwargs the signature of `/race`, from which Gradio reads its parameters."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=setting.default)
        for name, setting in SETTINGS.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=returns)
    types = {name: setting.type for name, setting in SETTINGS.items()}
    function.__annotations__ = {**types, "return": returns}
    function.__signature__ = signature  # type: ignore[attr-defined]
    return signature


def describe_parameters(parameters: Iterable[Any], limits: Limits, choices: Choices) -> None:
    """Give the components after the parameters, made in the table's order, their labels and words."""
    for setting, component in zip(SETTINGS.values(), parameters, strict=True):
        words = about(setting, limits, choices)
        component.label = setting.label or setting.name.replace("_", " ").capitalize()
        # Gradio shows the one beside the parameter; the other is JSON schema's own.
        component._api_info |= {"additional_description": words, "description": words}


def about(setting: Setting, limits: Limits, choices: Choices) -> str:
    """A setting in sentences: what it is, what it takes, its bounds, and what only a script has to know."""

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
