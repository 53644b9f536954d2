"""The methods by name, and the decoder that each is.

Contract: `build` makes a fresh decoder for a checked request.
"""

from __future__ import annotations

import copy

from ..amusd.decoder import build_amusd
from ..decoding.admission import cache_length
from ..decoding.base import Decoder, DecodingParams
from ..decoding.batch import BatchDecoder
from ..decoding.request import Request
from ..decoding.sequential import SequentialDecoder
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

    def batch(rows: list[Sequence]) -> BatchDecoder:
        count, length, backend = len(rows), cache_length(request, drafts), request.backend
        drafter = None
        if drafts:
            drafter = make_drafter(
                pair, request.drafter, count, length, backend, request.sampling, request.verification
            )
        runner = make_runner(pair.target_step, count, length, pair.vocab, backend)
        return BatchDecoder(rows, runner, rules, drafter, copy.deepcopy(request.policy) if drafts else None)

    if method == "speculative":
        return SequentialDecoder(sequences, lambda row: batch([row]))
    return batch(sequences)
