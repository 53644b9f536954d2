"""Refuse, in one sentence, unknown keyword arguments and requests that a method can't answer.

Contract: `generate`, `stream` and `race` list their keywords with types and defaults, so that an editor can
complete them. They catch other keywords only to pass them to `refuse_unknown`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from ...decoding.request import Request
from ...errors import RequestError
from ...models.pair import ModelPair
from ...sampling.params import SamplingParams

_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def refuse_unknown(function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raise RequestError for the first of these keywords, none of which `function` has."""
    for name in unknown:
        parameters = inspect.signature(function).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        if name in _SAMPLING:
            raise RequestError(
                f"{function.__name__} has no argument {name}: use sampling=SamplingParams({name}=...)."
            )
        near = get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
        raise RequestError(f"{function.__name__} has no argument {name}: {advice}")


def check_method(method: Any, pair: ModelPair, request: Request) -> None:
    """Raises RequestError if the method, an entry of METHODS, can't answer the request."""
    if method.check is not None:
        method.check(pair, request)
    if request.clock is None:
        return
    if method.outside:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, which predicts our own forwards alone: leave out the "
            "method, or the clock."
        )
    if method.overlaps:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, because what its rounds are depends on how long draft "
            "and target really take: leave out the method, or the clock."
        )
