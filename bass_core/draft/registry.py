"""The drafters by name: what `drafter=` may say, what each needs, and how it is made for a lane.

Contract: a new drafter is one line of `DRAFTERS`; nothing else compares a drafter's name. `choose_drafter` makes a
DrafterKind of a name or a user's object, once for a request, and refuses what a pair can't do, in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..errors import RequestError
from ..model.base import CausalModel
from ..model.draft_head import DraftHead
from ..model.graphs import runner_for
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..model.runner import ModelRunner
from ..sample.params import SamplingParams
from ..verify.rules import Verification
from .base import Drafter, own_drafter
from .head import HeadDrafter
from .lookup import Cascade, PromptLookupDrafter
from .model import ModelDrafter
from .window import WINDOW, WindowChain, WindowDrafter

# "adaptive" copies only after a match this long: a shorter one is right less often than the model.
CASCADE_MATCH = 3
# A head that stops when it is unsure stops once it gives its drafts less than this probability: one more token in
# a verification costs little. A forward of its own costs more (HEADROOM in draft/head.py).
CONFIDENCE = 0.1
# The same for AMUSD, whose target waits for no draft: those after an unsure one are likely to go with it.
AHEAD_CONFIDENCE = 0.2


class DraftSource(Protocol):
    """Whose draft it is: a ModelPair, or under AMUSD a copy of its draft on another device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int: ...

    @property
    def draft(self) -> PreTrainedModel | DraftHead | None: ...

    @property
    def draft_step(self) -> CausalModel | None: ...


@dataclass(frozen=True)
class Parts:
    """What the drafters of a lane are made of: the pair, how many rows are decoded at a time, and their texts.

    A lane's drafters take turns with one runner of the draft, which is made when the first of them needs it.
    target: the runner with which the lane's decoder verifies; None for AMUSD's draft, which has none.
    ahead: for AMUSD. A draft model or head drafts at most one token of a row in a proposal, so that the session
    reads the target's verdicts in between, and a head goes on from its own states until the target's arrive.
    tells: see Drafter. tree: the shape of trees (StaticTrees); None: chains.
    """

    pair: DraftSource
    rows: int
    texts: CachedTexts
    backend: str
    sampling: SamplingParams
    verification: Verification
    ahead: bool = False
    target: ModelRunner | None = None
    tells: bool = False
    tree: tuple[int, ...] | None = None

    @cached_property
    def runner(self) -> ModelRunner:
        """The runner of the pair's draft model or of its draft head's body."""
        pair, draft = self.pair, self.pair.draft
        assert pair.draft_step is not None
        head = isinstance(draft, DraftHead)
        vocab = len(draft.vocabulary) if isinstance(draft, DraftHead) else pair.vocab
        # A draft that runs ahead of the target feeds the last token of a prompt again, a head all of its slots.
        share = not self.ahead
        # A draft model reads no more of a prompt than its own context holds (ModelDrafter.start).
        texts = self.texts if head else self.texts.cropped(pair.draft_step.context)
        return runner_for(pair.draft_step, self.rows, texts, vocab, self.backend, share)

    def model(self, confidence: float = 0.0) -> Drafter:
        """The pair's draft model or draft head; only a head stops below `confidence`."""
        draft, runner, size = self.pair.draft, self.runner, self.pair.vocab
        made: Drafter
        if isinstance(draft, DraftHead):
            ways = (self.sampling, self.verification, confidence, self.ahead, self.tree)
            made = HeadDrafter(draft, runner, size, *ways)
        else:
            made = ModelDrafter(runner, self.sampling, self.verification, self.tree)
        made.tells = self.tells
        return made

    def adaptive(self) -> Drafter:
        """Copies after a long match, and asks the model for the other rows; a tree is the model's alone."""
        model = self.model(CONFIDENCE)
        if self.tree is not None:
            return model
        return Cascade(PromptLookupDrafter(shortest=CASCADE_MATCH), model, 1 if self.ahead else None)

    def window(self, tokens: int | None = None) -> WindowDrafter:
        """Drafts with the lane's target, which sees a text's first tokens and its last `tokens` (None: WINDOW)."""
        assert self.target is not None
        window = WINDOW if tokens is None else tokens
        return WindowDrafter(self.target, self.sampling, self.verification, window)


@dataclass(frozen=True)
class DrafterKind:
    """One line of `DRAFTERS`, or a user's own drafter.

    label: what a list of choices calls it; make: builds a fresh one. without_copies: makes the drafter that takes
    the same forwards and never copies; None: `make` does. own: a user's object, whose costs nobody knows.
    runs_model: it runs the pair's draft, which must be there, and keeps a cache of it; copies: it copies from the
    text; stops_when_unsure: a draft head stops where its drafts are likely to be refused; windows: the target
    drafts for itself, over part of its own cache; takes_shape: it makes trees of the shape that `tree=` gives;
    branches: it makes trees of its own; reads_others: it may draft for a row by what other rows have written.
    """

    label: str
    make: Callable[[Parts], Drafter]
    without_copies: Callable[[Parts], Drafter] | None = None
    own: bool = False
    runs_model: bool = False
    copies: bool = False
    stops_when_unsure: bool = False
    windows: bool = False
    takes_shape: bool = False
    branches: bool = False
    reads_others: bool = False

    @property
    def timed(self) -> Callable[[Parts], Drafter] | None:
        """Makes the drafter whose costs are measured; None: its drafts take no forward of any model."""
        return (self.without_copies or self.make) if self.runs_model or self.windows else None


DRAFTERS: dict[str, DrafterKind] = {
    "model": DrafterKind("draft model, at every position", Parts.model, runs_model=True, takes_shape=True),
    "prompt_lookup": DrafterKind(
        "prompt lookup: copies from the text so far", lambda parts: PromptLookupDrafter(), copies=True
    ),
    "adaptive": DrafterKind(
        "prompt lookup, else draft model, or draft head while it is confident",
        Parts.adaptive,
        without_copies=Parts.model,
        runs_model=True,
        copies=True,
        stops_when_unsure=True,
        takes_shape=True,
    ),
    "window": DrafterKind("the target, seeing the first tokens and the last", Parts.window, windows=True),
    "window_model": DrafterKind(
        "draft model for the target seeing few tokens",
        lambda parts: WindowChain(parts.model(), parts.window()),
        runs_model=True,
        windows=True,
    ),
}


def default_drafter(pair: ModelPair) -> str:
    """The name that "auto" stands for."""
    if pair.default_drafter != "auto":
        return pair.default_drafter
    return "model" if pair.draft is not None else "prompt_lookup"


def choose_drafter(pair: ModelPair, drafter: str | Drafter) -> DrafterKind:
    """What a request will draft with: a line of DRAFTERS, or a user's object. RequestError for what can't be."""
    if isinstance(drafter, str):
        return _named(pair, drafter)
    if not hasattr(drafter, "propose"):
        raise RequestError(f"drafter must be auto, {', '.join(DRAFTERS)} or a drafter object; got {drafter!r}.")
    return DrafterKind(
        "a drafter of the user's own",
        lambda parts: own_drafter(drafter),
        own=True,
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
    """How many of a row's drafts AMUSD verifies: while theirs times q's largest value is AHEAD_CONFIDENCE or more.

    max_probs[i], token_probs[i]: q's largest value at draft i, and q of the token drawn there. Whether a draft is
    verified never depends on which token was drawn there, so it is distributed as q says.
    """
    chance = 1.0
    for count, (top, own) in enumerate(zip(max_probs, token_probs, strict=True)):
        if not chance * top >= AHEAD_CONFIDENCE:  # nor after a q that is no number
            return count
        chance *= own
    return len(max_probs)
