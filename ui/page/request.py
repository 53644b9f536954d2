"""A race as the page or a script may request it, made from the table of settings.

`make_request` checks the values of a form or a script, and raises RequestError with one sentence for the visitor.
A request contains only the settings' values, so it can be pickled. The same table documents the parameters of
`/race` in Gradio's "Use via API" and in /gradio_api/info (`describe`, `describe_parameters`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from bass_core import ModelPair, SamplingParams, Snapshot, race
from ui.page import clock
from ui.page.choices import Choices
from ui.page.limits import MAX_DRAFT_LENGTH, Limits, lines
from ui.page.setting import SETTINGS, Setting, Words

SAMPLING = "sampling."


class RaceRequest(SimpleNamespace):
    """One race: an attribute for each setting, named as in `/race`. An empty `pair` means the operator's own."""

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def run(self, pair: ModelPair, stopped: Callable[[], bool]) -> Generator[Snapshot, None, None]:
        """Yield the snapshots of the race. `stopped` is checked after every step."""
        yield from race(pair, **self.arguments(), stopped=stopped)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for bass_core's `race`."""
        options: dict[str, Any] = {"inspect": True}
        sampling: dict[str, Any] = {}
        for name, keyword in keywords().items():
            if keyword.startswith(SAMPLING):
                sampling[keyword.removeprefix(SAMPLING)] = getattr(self, name)
            elif keyword:
                options[keyword] = getattr(self, name)
        if self.prompts == "lines":
            options["prompt"] = lines(self.prompt, Limits(max_batch=self.batch_size))
        predicted = clock.clock(vars(self))
        return options | {"sampling": SamplingParams(**sampling)} | ({"clock": predicted} if predicted else {})


def make_request(given: Mapping[str, Any], limits: Limits) -> RaceRequest:
    """Check the settings and return the request. Missing settings get their defaults.

    With one prompt per line, the batch size is the number of lines. A single line is one prompt for all rows.

    Raises:
        RequestError: for a value that is not allowed.
    """
    values = {
        name: setting.check(setting.label, given.get(name, setting.default), limits)
        for name, setting in SETTINGS.items()
    }
    if values["prompts"] == "lines":
        prompts = lines(values["prompt"], limits)
        if len(prompts) > 1:
            values["batch_size"] = len(prompts)
        else:
            values |= {"prompts": "one", "prompt": prompts[0]}
    clock.clock(values)  # raises for a clock that cannot be made
    return RaceRequest(**values)


def keywords() -> dict[str, str]:
    """Return `Setting.argument` by setting: its keyword in bass_core's `race`, "sampling.x" or ""."""
    return {name: setting.argument for name, setting in SETTINGS.items()}


def defaults() -> dict[str, Any]:
    """Return the parameters of `/race` with their defaults, in order."""
    return {name: setting.default for name, setting in SETTINGS.items()}


def describe(function: Callable[..., Any], returns: object) -> inspect.Signature:
    """Give a function the signature of `/race`, from which Gradio reads parameters, types and defaults."""
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
    """Set label and description of Gradio's components for the parameters of `/race`, in the table's order."""
    for setting, component in zip(SETTINGS.values(), parameters, strict=True):
        words = about(setting, limits, choices)
        component.label = setting.label or setting.name.replace("_", " ").capitalize()
        # Gradio shows `additional_description` next to the parameter; `description` is the field of JSON schema.
        component._api_info |= {"additional_description": words, "description": words}


def about(setting: Setting, limits: Limits, choices: Choices) -> str:
    """Describe a setting for a script in sentences: its meaning, its bounds and its possible values."""

    def resolve(words: Words) -> str:
        return words(limits, choices) if callable(words) else words

    parts = [resolve(setting.explain), resolve(setting.script)]
    if setting.choices is not None:
        words = [(label, value) for label, value in setting.choices(choices) if not value.isdecimal()]
        listed = [f"{value!r} ({label.removeprefix(f'{value}: ')})" for label, value in words]
        if len(words) < len(setting.choices(choices)):
            listed.append(f"or a whole number from 1 to {MAX_DRAFT_LENGTH}")
        parts.append(f"Values: {'; '.join(listed)}")
    return " ".join(_sentence(part) for part in parts if part)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + ("" if words.endswith((".", "!")) else ".")
