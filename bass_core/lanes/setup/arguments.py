"""Refuse requests that a method can't answer.

Contract: nothing is run, and what is refused raises RequestError with one sentence.
"""

from __future__ import annotations

from typing import Any

from ...budget.options import fixed_length
from ...budget.recorded import RecordedLengths
from ...decoding.request import Request
from ...errors import RequestError
from ...models.pair import ModelPair


def check_method(method: Any, pair: ModelPair, request: Request) -> None:
    """Raises RequestError if the method, an entry of METHODS, can't answer the request."""
    if method.check is not None:
        method.check(pair, request)
    if method.drafts:
        _check_noise(request)
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


def _check_noise(request: Request) -> None:
    """For methods that draft: refuse equal ids where a row's draft lengths go by what other rows accepted.

    That was decided by the noise which then judges the row that is behind. A greedy text uses none, and a coupled
    one does not depend on lengths.
    """
    ids, own = request.sequence_ids, request.draft_length
    known = request.tree is not None or fixed_length(own) is not None or isinstance(own, RecordedLengths)
    if len(set(ids)) < len(ids) and not (known or request.sampling.greedy or request.rule.coupled):
        raise RequestError(
            f"sequence_ids must differ where the draft length depends on what other rows accept; got {ids!r}: "
            'give each row an id of its own, or choose a fixed draft_length, or verification="coupled".'
        )
