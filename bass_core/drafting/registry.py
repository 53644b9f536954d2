"""The drafters by name: what `drafter=` may say, and how each is made for a lane.

Contract: `choose_drafter` refuses what a pair can't do, in one sentence; `make_drafter` builds a fresh one.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from ..engine.cuda_graphs import make_runner
from ..errors import RequestError
from ..models.base import CausalModel
from ..models.draft_head import DraftHead
from ..models.ngram import NgramTable
from ..models.pair import ModelPair
from ..sampling.params import SamplingParams
from .base import Drafter, ModelDrafter
from .head import HeadDrafter
from .lookup import Cascade, LookupChain, NgramDrafter, PromptLookupDrafter, SiblingLookupDrafter

DRAFTERS = ("model", "prompt_lookup", "sibling_lookup", "ngram", "lookup", "cascade", "adaptive")
# The cascade copies only after a match this long: a shorter one is right less often than the model.
CASCADE_MATCH = 3
# "adaptive" is the cascade whose head stops once it gives its draft less than this probability: one more token in
# a verification costs little. A forward of its own costs more (HEADROOM in drafting/head.py).
CONFIDENCE = 0.1
# AMUSD's drafts are there anyway; those behind are likely to be thrown away with one that fails.
AHEAD_CONFIDENCE = 0.2


def choose_drafter(pair: ModelPair, drafter: Any) -> Any:
    """The name, or the drafter object, that a request will use. Raises RequestError for what can't be."""
    if drafter == "auto":
        drafter = pair.default_drafter
        if drafter == "auto":
            drafter = "model" if pair.draft is not None else "prompt_lookup"
    if runs_model(drafter) and pair.draft is None:
        raise RequestError(
            f'This pair has no draft model for drafter="{drafter}": choose drafter="prompt_lookup" or load one '
            "with draft=."
        )
    if drafter == "adaptive" and not isinstance(pair.draft, DraftHead):
        raise RequestError(
            'drafter="adaptive" needs a draft head, and this pair drafts with a model: choose "cascade".'
        )
    if drafter in ("ngram", "lookup") and pair.ngrams is None:
        raise RequestError(f'This pair has no n-gram table for drafter="{drafter}": choose "prompt_lookup".')
    if drafter not in DRAFTERS and not hasattr(drafter, "propose"):
        raise RequestError(f"drafter must be auto, {', '.join(DRAFTERS)} or a drafter object; got {drafter!r}.")
    return drafter


def confident_prefix(max_probs: list[float], token_probs: list[float]) -> int:
    """How many of AMUSD's drafts in a row to look at: while they, times q's largest value, keep AHEAD_CONFIDENCE.

    max_probs[i], token_probs[i]: q's largest value at draft i, and that of the token drawn. What was drawn at a
    position has no say in whether it is looked at, so that q stays what it was drawn from.
    """
    chance = 1.0
    for count, (top, own) in enumerate(zip(max_probs, token_probs, strict=True)):
        if chance * top < AHEAD_CONFIDENCE:
            return count
        chance *= own
    return len(max_probs)


def runs_model(drafter: Any) -> bool:
    """Whether the drafter keeps a cache of the pair's draft."""
    return drafter in ("model", "cascade", "adaptive")


def copies(drafter: Any) -> bool:
    """Whether a drafter that runs the pair's draft copies from the text first."""
    return drafter in ("cascade", "adaptive")


def stops_when_unsure(drafter: Any) -> bool:
    """Whether a drafter stops behind a draft that it is unsure of."""
    return bool(drafter == "adaptive")


class DraftSource(Protocol):
    """What drafters are made of: a ModelPair, or the draft alone, in AMUSD's process."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int: ...

    @property
    def draft(self) -> Any: ...

    @property
    def draft_step(self) -> CausalModel | None: ...

    @property
    def ngrams(self) -> NgramTable | None: ...


def make_drafter(
    pair: DraftSource,
    drafter: Any,
    rows: int,
    length: int,
    backend: str,
    sampling: SamplingParams,
    rule: str,
    *,
    ahead: bool = False,
) -> Drafter:
    """A drafter for `rows` rows of at most `length` tokens.

    ahead: for AMUSD. A model or head drafts one token a proposal, so that verdicts are heard in between, and a
    head need not have the target's states (HeadDrafter).
    """
    device, most = pair.device, 1 if ahead else None

    def model(confidence: float = 0.0) -> Drafter:
        assert pair.draft_step is not None
        if isinstance(pair.draft, DraftHead):
            vocab = len(pair.draft.vocabulary)
            runner = make_runner(pair.draft_step, rows, length, vocab, backend, keep_states=True)
            return HeadDrafter(pair.draft, runner, pair.vocab, sampling, rule, confidence, ahead)
        return ModelDrafter(make_runner(pair.draft_step, rows, length, pair.vocab, backend), sampling, rule)

    def ngrams(shortest: int) -> NgramDrafter:
        assert pair.ngrams is not None
        return NgramDrafter(pair.ngrams, device, shortest)

    made: Drafter
    if drafter == "model":
        made = model()
    elif drafter == "prompt_lookup":
        made = PromptLookupDrafter(device)
    elif drafter == "sibling_lookup":
        made = SiblingLookupDrafter(device)
    elif drafter == "ngram":
        made = ngrams(1)
    elif drafter == "lookup":
        made = LookupChain(PromptLookupDrafter(device), ngrams(1))
    elif drafter == "cascade":
        made = Cascade(PromptLookupDrafter(device, shortest=CASCADE_MATCH), model(), pair.vocab, most)
    elif drafter == "adaptive":
        made = Cascade(PromptLookupDrafter(device, shortest=CASCADE_MATCH), model(CONFIDENCE), pair.vocab, most)
    else:
        made = copy.deepcopy(drafter)
    return made
