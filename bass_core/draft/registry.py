"""The drafters by name: the values of `drafter=`, and how each drafter is built for a lane.

`choose_drafter` turns a name or a user's object into a DrafterKind, once per request.
To add a drafter, add a line to `DRAFTERS`: no other code compares the names of drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kernels.support import is_accelerator

from ..errors import RequestError
from ..model.base import CausalModel
from ..model.draft_head import DraftHead
from ..model.graphs import runner_for
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..model.runner import ModelRunner
from ..sample.params import SamplingParams
from ..verify.rules import AUTOMATIC, Verification
from .base import Drafter, Proposal, wrap_user_drafter
from .chain import ChainSampler
from .head.ahead import AheadFeed, AheadHeadDrafter
from .head.captured import CapturedHeadDrafter
from .head.chain import HeadDrafter
from .head.compiled import CompiledHeadDrafter
from .head.feed import CompiledFeed, HeadFeed
from .lookup import Cascade, PromptLookupDrafter
from .model import ModelDrafter
from .model_graph import CapturedModelDrafter
from .tree import TreePlanner
from .window import WINDOW, WindowChain, WindowDrafter

# "adaptive" copies only after a match of at least this many tokens. After a shorter match, a draft of the model is
# accepted more often than a copy.
CASCADE_MATCH = 3
# A draft head stops once its drafts are less likely than this. The limit is low because one more token in a
# verification costs little; HEADROOM in chain.py accounts for the head's own forwards.
CONFIDENCE = 0.1
# The same limit for AMUSD. It is higher because drafts after an unlikely draft are usually discarded.
AHEAD_CONFIDENCE = 0.2


class DraftSource(Protocol):
    """The owner of a draft: a ModelPair, or for AMUSD a copy of its draft on another device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int: ...

    @property
    def draft(self) -> PreTrainedModel | DraftHead | None: ...

    @property
    def draft_step(self) -> CausalModel | None: ...


@dataclass(frozen=True)
class DrafterInputs:
    """The parts that a lane's drafters are built from.

    All drafters of a lane share one runner of the draft, made when the first of them needs it.

    Attributes:
        rows: how many rows are decoded at a time.
        ahead: for AMUSD. A draft model or head drafts at most one token per row and proposal, so that the session
            can read the target's verdicts in between. A head uses its own states until the target's arrive.
        target: the runner with which the lane's decoder verifies. None for AMUSD.
        report_probs: see Drafter.
        tree: shape of trees (TreePlanner). None: chains.
        masked: whether rows have grammars, whose masks the draft model needs between its tokens.
    """

    pair: DraftSource
    rows: int
    texts: CachedTexts
    backend: str
    sampling: SamplingParams
    verification: Verification
    ahead: bool = False
    target: ModelRunner | None = None
    report_probs: bool = False
    tree: tuple[int, ...] | None = None
    masked: bool = False

    @cached_property
    def runner(self) -> ModelRunner:
        """The runner of the pair's draft model, or of its draft head's body."""
        pair, draft = self.pair, self.pair.draft
        assert pair.draft_step is not None
        head = isinstance(draft, DraftHead)
        vocab = len(draft.vocabulary) if isinstance(draft, DraftHead) else pair.vocab
        # AMUSD can't share prefixes, because it feeds prompt tokens a second time: the last token of a prompt to a
        # draft model, and all tokens to a draft head.
        share = not self.ahead
        # A draft model reads only as much of a prompt as fits its context (ModelDrafter.start).
        texts = self.texts if head else self.texts.cropped(pair.draft_step.context)
        return runner_for(pair.draft_step, self.rows, texts, vocab, self.backend, share)

    def model(self, confidence: float = 0.0, in_graphs: bool = True) -> Drafter:
        """Return a drafter of the pair's draft model or head. Only a head uses `confidence`.

        If `in_graphs` is false, it captures no whole rounds: their graphs need the noise keys of a batch's rounds.
        """
        draft, runner, size = self.pair.draft, self.runner, self.pair.vocab
        drafter: Drafter
        if isinstance(draft, DraftHead):
            options = (self.sampling, self.verification, confidence, self.ahead, self.tree, in_graphs)
            drafter = head_drafter(draft, runner, size, *options)
        else:
            in_graphs = in_graphs and runner.captures and not (self.ahead or self.masked)
            model = CapturedModelDrafter if in_graphs else ModelDrafter
            drafter = model(runner, self.sampling, self.verification, self.tree)
        drafter.report_probs = self.report_probs
        return drafter

    def adaptive(self) -> Drafter:
        """Return a drafter that copies after a long match and otherwise runs the model. Trees never copy."""
        model = self.model(CONFIDENCE)
        if self.tree is not None:
            return model
        no_drafts = None
        if isinstance(model, CapturedHeadDrafter | CapturedModelDrafter):
            no_drafts = partial(_no_drafts, model.chains, model.runner.device)
        lookup = PromptLookupDrafter(shortest=CASCADE_MATCH)
        return Cascade(lookup, model, 1 if self.ahead else None, no_drafts)

    def window(self, tokens: int | None = None) -> WindowDrafter:
        """Return a drafter that runs the target on a text's first tokens and its last `tokens` (None: WINDOW)."""
        assert self.target is not None
        window = WINDOW if tokens is None else tokens
        return WindowDrafter(self.target, self.sampling, self.verification, window)


def _no_drafts(chains: ChainSampler, device: torch.device, rows: int) -> Proposal:
    """Return a proposal without drafts, like those that come with q unless decoding is greedy."""
    probs = None if chains.params.greedy else torch.zeros(rows, 0, chains.size, device=device)
    return Proposal(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows, probs)


def head_drafter(
    head: DraftHead,
    runner: ModelRunner,
    size: int,
    params: SamplingParams,
    verification: Verification = AUTOMATIC,
    confidence: float = 0.0,
    ahead: bool = False,
    tree: tuple[int, ...] | None = None,
    in_graphs: bool = True,
) -> HeadDrafter:
    """Return the drafter of a draft head: trees if there is a shape, else chains.

    `ahead` as in DrafterInputs, `in_graphs` as in DrafterInputs.model. On an accelerator, where a wasted forward
    costs less than waiting for the device, no chain stops early.
    """
    inputs = head.compiled_inputs
    if ahead:
        return AheadHeadDrafter(AheadFeed(head, runner), size, params, verification, confidence)
    feed, chains, in_graphs = HeadFeed(head, runner), HeadDrafter, in_graphs and runner.captures
    if inputs is not None and runner.model.can_draft(inputs.fuse):
        feed, chains = CompiledFeed(head, runner, inputs), CompiledHeadDrafter
    trees = None if tree is None else TreePlanner(tree, params, verification.draft_role, size)
    confidence = 0.0 if is_accelerator(runner.device) else confidence
    drafter = CapturedHeadDrafter if in_graphs else chains
    return drafter(feed, size, params, verification, confidence, trees)


@dataclass(frozen=True)
class DrafterKind:
    """One line of `DRAFTERS`, or a user's own drafter.

    Attributes:
        label: its name in lists of choices.
        make: builds a drafter.
        without_copies: builds a drafter that runs the same forwards and never copies. None if `make` builds one.
        is_user_object: it is the user's own object, so its costs are unknown.
        runs_model: it runs the pair's draft, which must exist, and needs a cache for it.
        copies: it copies from the text.
        stops_when_unsure: a draft head stops if its drafts are likely to be rejected.
        windows: the target drafts for itself, over part of its own cache.
        takes_shape: it makes trees of the shape in `tree=`.
        branches: it makes trees, of any shape.
        reads_others: the drafts of a row may depend on other rows' texts.
    """

    label: str
    make: Callable[[DrafterInputs], Drafter]
    without_copies: Callable[[DrafterInputs], Drafter] | None = None
    is_user_object: bool = False
    runs_model: bool = False
    copies: bool = False
    stops_when_unsure: bool = False
    windows: bool = False
    takes_shape: bool = False
    branches: bool = False
    reads_others: bool = False

    @property
    def timed(self) -> Callable[[DrafterInputs], Drafter] | None:
        """The builder of the drafter whose costs are measured, or None if the drafter runs no model."""
        return (self.without_copies or self.make) if self.runs_model or self.windows else None


DRAFTERS: dict[str, DrafterKind] = {
    "model": DrafterKind("draft model, at every position", DrafterInputs.model, runs_model=True, takes_shape=True),
    "prompt_lookup": DrafterKind(
        "prompt lookup: copies from the text so far", lambda parts: PromptLookupDrafter(), copies=True
    ),
    "adaptive": DrafterKind(
        "prompt lookup, else draft model, or draft head while it is confident",
        DrafterInputs.adaptive,
        without_copies=DrafterInputs.model,
        runs_model=True,
        copies=True,
        stops_when_unsure=True,
        takes_shape=True,
    ),
    "window": DrafterKind("the target, seeing the first tokens and the last", DrafterInputs.window, windows=True),
    "window_model": DrafterKind(
        "draft model for the target seeing few tokens",
        lambda parts: WindowChain(parts.model(in_graphs=False), parts.window()),
        runs_model=True,
        windows=True,
    ),
}


def default_drafter(pair: ModelPair) -> str:
    """Return the name that "auto" stands for with this pair."""
    if pair.default_drafter != "auto":
        return pair.default_drafter
    return "model" if pair.draft is not None else "prompt_lookup"


def choose_drafter(pair: ModelPair, drafter: str | Drafter) -> DrafterKind:
    """Return the drafter for a request: a line of DRAFTERS, or a user's object.

    Raises:
        RequestError: if there is no such drafter, or the pair lacks the draft model that it needs.
    """
    if isinstance(drafter, str):
        return _named(pair, drafter)
    if not hasattr(drafter, "propose"):
        raise RequestError(f"drafter must be auto, {', '.join(DRAFTERS)} or a drafter object; got {drafter!r}.")
    return DrafterKind(
        "a drafter of the user's own",
        lambda parts: wrap_user_drafter(drafter),
        is_user_object=True,
        branches=bool(getattr(drafter, "branches", False)),
        reads_others=bool(getattr(drafter, "reads_others", True)),
    )


def _named(pair: ModelPair, name: str) -> DrafterKind:
    kind = DRAFTERS.get(default_drafter(pair) if name == "auto" else name)
    if kind is None:
        raise RequestError(f"drafter must be auto, {', '.join(DRAFTERS)} or a drafter object; got {name!r}.")
    if kind.runs_model and pair.draft is None:
        raise RequestError(
            f'This pair has no draft model for drafter="{name}": choose drafter="prompt_lookup" or load one '
            "with draft=."
        )
    return kind


def confident_prefix(max_probs: list[float], token_probs: list[float]) -> int:
    """Return how many of a row's drafts AMUSD verifies.

    A draft is verified if the product of two numbers is at least AHEAD_CONFIDENCE: the joint probability of the
    drafts before it, and the largest value of its own q. The product doesn't depend on which token was drawn for
    this draft, so a verified draft is still distributed as q.

    Args:
        max_probs: q's largest value at each draft.
        token_probs: q of each drafted token.
    """
    chance = 1.0
    for count, (max_prob, token_prob) in enumerate(zip(max_probs, token_probs, strict=True)):
        if not chance * max_prob >= AHEAD_CONFIDENCE:  # also stops at NaN
            return count
        chance *= token_prob
    return len(max_probs)
