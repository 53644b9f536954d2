"""Whether AMUSD can answer a request, and how far its draft runs ahead.

Contract: plain checks of a checked request; no model runs.
"""

from __future__ import annotations

from ..budget.options import fixed_length
from ..decoding.request import Request
from ..drafting.registry import runs_model, windows
from ..errors import RequestError
from ..models.pair import ModelPair
from ..models.weights.placement import is_split

# Tokens that the draft runs ahead unless draft_length is an integer, and the most that an integer can ask for.
LEAD, LONGEST_LEAD = 8, 64


def refuse_amusd(pair: ModelPair, request: Request) -> None:
    """Raises RequestError for a request that AMUSD can't answer."""
    if windows(request.drafter):
        raise RequestError(
            f'method="amusd" drafts beside the target, and drafter="{request.drafter}" drafts with it: choose '
            'drafter="model".'
        )
    if pair.draft is None or not runs_model(request.drafter):
        raise RequestError(
            'method="amusd" runs a draft model beside the target, and this drafter runs no model: load the '
            'pair with draft= and choose drafter="model".'
        )
    if request.tree is not None:
        raise RequestError('method="amusd" drafts chains alone: leave tree out, or choose method="bass".')
    if is_split(pair.target):
        raise RequestError(
            'method="amusd" can\'t follow a target that is split over several devices: choose "bass", or load the '
            "pair without a device_map."
        )
    if request.rule.adjust is not None:
        raise RequestError(
            f'method="amusd" can\'t verify by "{request.verification}": choose verification="auto".'
        )
    if lead_of(request) < 1:
        raise RequestError('method="amusd" needs a draft_length of at least 1: choose one, or leave it out.')


def lead_of(request: Request) -> int:
    """Tokens that the draft may be ahead of the target: draft_length if it is an integer, else LEAD."""
    length = fixed_length(request.draft_length)
    return LEAD if length is None else min(length, LONGEST_LEAD)
