"""Refuse requests that a method can't answer.

Contract: nothing is run, and what is refused raises RequestError with one sentence.
"""

from __future__ import annotations

from typing import Any

from ...decoding.checks import check_noise
from ...decoding.request import Request
from ...errors import RequestError
from ...models.pair import ModelPair


def check_method(method: Any, pair: ModelPair, request: Request) -> None:
    """Raises RequestError if the method, an entry of METHODS, can't answer the request."""
    if method.check is not None:
        method.check(pair, request)
    if method.drafts:
        check_noise(request)
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
