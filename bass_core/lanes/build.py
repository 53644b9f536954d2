"""Builders of each method's decoder.

A builder takes a checked request and the lane's sequences. The decoder that it returns has allocated its memory,
but has not run a step.
"""

from __future__ import annotations

from ..decode.admission import cache_padding
from ..decode.amusd.decoder import make_amusd
from ..decode.base import Decoder, DecodingParams, cache_bytes
from ..decode.batch import BatchDecoder
from ..decode.measuring import policy_of_request
from ..decode.request import Request
from ..decode.sequential import SequentialDecoder
from ..draft.registry import DrafterInputs
from ..length.options import longest_draft
from ..model.graphs import runner_for
from ..model.pair import ModelPair
from ..sequence import Sequence


def build_regular(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Build regular decoding: no drafter, one token per row and step."""
    return _DecoderFactory(pair, request, len(sequences), drafts=False).make(sequences)


def build_speculative(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Build speculative decoding of one sequence after another, in the same caches."""
    factory = _DecoderFactory(pair, request, 1, drafts=True)
    return SequentialDecoder(sequences, lambda row: factory.make([row]), factory.cache)


def build_bass(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Build BASS: draft and verify all sequences together."""
    return _DecoderFactory(pair, request, len(sequences), drafts=True).make(sequences)


def build_amusd(pair: ModelPair, request: Request, sequences: list[Sequence]) -> Decoder:
    """Build AMUSD: the draft model runs in its own thread while the target verifies."""
    return make_amusd(pair, request, _params(request), sequences)


class _DecoderFactory:
    """Makes the decoders of a lane that decodes `rows` rows at a time, each with its own length policy."""

    def __init__(self, pair: ModelPair, request: Request, rows: int, drafts: bool) -> None:
        self.request, self.drafts, self.limit = request, drafts, longest_draft(request.draft_length)
        texts, backend = request.texts(cache_padding(request, drafts)), request.backend
        self.target = runner_for(pair.target_step, rows, texts, pair.vocab, backend)
        self.parts = DrafterInputs(
            pair,
            rows,
            texts,
            backend,
            request.sampling,
            request.rule,
            target=self.target,
            report_probs=request.inspect,
            tree=request.tree,
        )
        runs_model = drafts and request.kind.runs_model
        self.cache = cache_bytes(self.target, self.parts.runner if runs_model else None)

    def make(self, rows: list[Sequence]) -> BatchDecoder:
        drafter = self.request.kind.make(self.parts) if self.drafts else None
        policy = policy_of_request(self.request) if self.drafts else None
        copies = self.request.copies
        if self.drafts and copies is not None:
            copies += [drafter] if self.request.kind.is_user_object else []
            copies += [] if isinstance(self.request.draft_length, str | int) else [policy]
        params = _params(self.request)
        return BatchDecoder(rows, self.target, params, drafter, policy, self.limit, cache=self.cache)


def _params(request: Request) -> DecodingParams:
    options = request.inspect, request.logprobs
    return DecodingParams(request.sampling, request.seed, request.rule, request.synthetic_acceptance, *options)
