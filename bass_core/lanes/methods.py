"""The methods by name, and the decoder that each is.

Contract: `build` makes a fresh decoder for a checked request.
"""

from __future__ import annotations

import copy

from ..amusd.decoder import build_amusd
from ..decoding.admission import cache_length
from ..decoding.base import Decoder, DecodingParams
from ..decoding.batch import BatchDecoder
from ..decoding.budgets import make_budget
from ..decoding.request import Request
from ..decoding.sequential import SequentialDecoder
from ..drafting.base import observes_states
from ..drafting.registry import make_drafter
from ..engine.cuda_graphs import make_runner
from ..models.pair import ModelPair
from ..sequence import Sequence


def build(pair: ModelPair, request: Request, method: str, sequences: list[Sequence]) -> Decoder:
    """The decoder of a method: regular has no drafter, speculative runs one row at a time, bass all at once."""
    rules = DecodingParams(request.sampling, request.seed, request.verification, request.synthetic_acceptance)
    if method == "amusd":
        return build_amusd(pair, request, rules, sequences)
    drafts = method != "regular"
    budget = make_budget(request, budget_rows(request, method)) if drafts else None

    def batch(rows: list[Sequence]) -> BatchDecoder:
        count, length, backend = len(rows), cache_length(request, drafts), request.backend
        drafter = None
        if drafts:
            drafter = make_drafter(
                pair, request.drafter, count, length, backend, request.sampling, request.verification
            )
        runner = make_runner(
            pair.target_step, count, length, pair.vocab, backend, keep_states=observes_states(drafter)
        )
        return BatchDecoder(rows, runner, rules, drafter, copy.deepcopy(budget))

    if method == "speculative":
        return SequentialDecoder(sequences, lambda row: batch([row]))
    return batch(sequences)


def budget_rows(request: Request, method: str) -> int:
    """Rows of the batch for which the method's budget is made; 0 for a method that has none."""
    if method in ("regular", "amusd"):
        return 0
    return 1 if method == "speculative" else len(request.prompts)
