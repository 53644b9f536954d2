"""A race as the page may ask for it, made from the table of settings.

Contract: `make_request` checks what a form or a script sent. The request is plain data, so that it can be pickled,
and holds no more than the settings' values. Raises RequestError, one sentence that says what to change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from bass_core import SamplingParams
from ui.clock import machine
from ui.page.limits import Limits, lines
from ui.page.setting import SETTINGS

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
        clock = machine.clock(vars(self))
        return given | {"sampling": SamplingParams(**sampling)} | ({} if clock is None else {"clock": clock})


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
    machine.clock(values)  # refuses what it can't predict for
    return RaceRequest(**values)


def keywords() -> dict[str, str]:
    """Each setting's keyword of bass_core's `race`: "sampling.x" for a field of SamplingParams, "" for none."""
    return {name: setting.argument for name, setting in SETTINGS.items()}


def defaults() -> dict[str, Any]:
    """The parameters of `/race` with their defaults, in their order."""
    return {name: setting.default for name, setting in SETTINGS.items()}


def describe(function: Callable[..., Any], returns: Any) -> inspect.Signature:
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
