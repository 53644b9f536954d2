"""How the decoder of each method is built.

Contract: each builder takes a checked request and the lane's sequences, and returns a decoder that has allocated
its memory and has not run a step.
"""

from __future__ import annotations

import copy

from ...amusd.decoder import build_amusd
from ...budget.base import Budget
from ...decoding.admission import cache_length
from ...decoding.base import Decoder, DecodingParams
from ...decoding.batch import BatchDecoder
from ...decoding.budgets import make_budget
from ...decoding.request import Request
from ...decoding.sequential import SequentialDecoder
from ...drafting.registry import make_drafter
from ...engine.cuda_graphs import make_runner
from ...models.pair import ModelPair
from ...sequence import Sequence


def build_regular(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """The loop without a drafter: one token per row and step."""
    return _batch(pair, request, sequences, None)


def build_speculative(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Draft and verify, one sequence after another."""
    budget = make_budget(request, 1)
    return SequentialDecoder(sequences, lambda row: _batch(pair, request, [row], budget))


def build_bass(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Draft and verify all sequences together."""
    return _batch(pair, request, sequences, make_budget(request, len(sequences)))


def build_overlapped(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """AMUSD: the draft model runs in its own process while the target verifies."""
    return build_amusd(pair, request, _params(request), sequences)


def _batch(pair: ModelPair, request: Request, rows: list[Sequence], budget: Budget | None) -> BatchDecoder:
    drafts = budget is not None
    count, length, backend = len(rows), cache_length(request, drafts), request.backend
    drafter = None
    if drafts:
        drafter = make_drafter(
            pair, request.drafter, count, length, backend, request.sampling, request.verification
        )
    runner = make_runner(pair.target_step, count, length, pair.vocab, backend)
    return BatchDecoder(rows, runner, _params(request), drafter, copy.deepcopy(budget))


def _params(request: Request) -> DecodingParams:
    return DecodingParams(request.sampling, request.seed, request.verification, request.synthetic_acceptance)
