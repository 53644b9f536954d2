"""The drafters by name: what `drafter=` may say, what each needs, and how it is made for a lane.

Contract: a new drafter is one line of `DRAFTERS`; nothing else compares a drafter's name. `choose_drafter` refuses
what a pair can't do, in one sentence; `make_drafter` builds a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from ..engine.cuda_graphs import runner_for
from ..engine.prefix import CachedTexts
from ..engine.runner import ModelRunner
from ..errors import RequestError
from ..models.base import CausalModel
from ..models.draft_head import DraftHead
from ..models.ngram import NgramTable
from ..models.pair import ModelPair
from ..sampling.params import SamplingParams
from .base import Drafter, own_drafter, refuse_old_names
from .combine import Cascade, LookupChain, WindowChain
from .head import HeadDrafter
from .lookup import PromptLookupDrafter, SiblingLookupDrafter
from .model import ModelDrafter
from .ngram import NgramDrafter
from .window import WINDOW, WindowDrafter

# The cascade copies only after a match this long: a shorter one is right less often than the model.
CASCADE_MATCH = 3
# A head that stops when it is unsure stops once it gives its drafts less than this probability: one more token in
# a verification costs little. A forward of its own costs more (HEADROOM in drafting/head.py).
CONFIDENCE = 0.1
# The same for AMUSD, whose target waits for no draft: those behind an unsure one are likely to go with it.
AHEAD_CONFIDENCE = 0.2


class DraftSource(Protocol):
    """Whose draft it is: a ModelPair, or under AMUSD a copy of its draft on another device."""

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
    verification: str
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
        vocab = len(draft.vocabulary) if head else pair.vocab
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

    def prompt_lookup(self, shortest: int = 2) -> PromptLookupDrafter:
        """Copies from the row's own text, behind a match of at least `shortest` tokens."""
        return PromptLookupDrafter(self.pair.device, shortest=shortest)

    def siblings(self) -> SiblingLookupDrafter:
        """Copies from the text of any row."""
        return SiblingLookupDrafter(self.pair.device)

    def ngrams(self) -> NgramDrafter:
        """Drafts by the pair's table of n-grams."""
        assert self.pair.ngrams is not None
        return NgramDrafter(self.pair.ngrams, self.pair.device)

    def cascade(self, confidence: float = 0.0) -> Drafter:
        """Copies behind a long match, and asks the model for the other rows; a tree is the model's alone."""
        if self.tree is not None:
            return self.model(confidence)
        most = 1 if self.ahead else None
        return Cascade(self.prompt_lookup(CASCADE_MATCH), self.model(confidence), self.pair.vocab, most)

    def window(self, tokens: int | None = None) -> WindowDrafter:
        """Drafts with the lane's target, which sees a text's first tokens and its last `tokens` (None: WINDOW)."""
        assert self.target is not None
        window = WINDOW if tokens is None else tokens
        return WindowDrafter(self.target, self.sampling, self.verification, window)

    def window_cascade(self) -> Cascade:
        """Copies behind a long match, and asks the windowed target for the other rows."""
        return Cascade(self.prompt_lookup(CASCADE_MATCH), self.window(), self.pair.vocab)

    def window_model(self) -> WindowChain:
        """Drafts with the windowed target, for which the pair's draft model or head drafts."""
        return WindowChain(self.model(), self.window(), self.verification)


@dataclass(frozen=True)
class DrafterKind:
    """One line of `DRAFTERS`. label: what a list of choices calls it; make: builds it.

    runs_model: it runs the pair's draft, which must be there; needs_head: that draft must be a draft head;
    needs_ngrams: the pair must have a table of n-grams; copies: it copies from the text before it asks the model;
    stops_when_unsure: it stops behind drafts that are likely to be refused; windows: the target drafts for itself,
    over part of its own cache; branches: it can make trees (`tree=`); reads_others: it drafts for a row by what
    other rows have written.
    """

    label: str
    make: Callable[[Parts], Drafter]
    runs_model: bool = False
    needs_head: bool = False
    needs_ngrams: bool = False
    copies: bool = False
    stops_when_unsure: bool = False
    windows: bool = False
    branches: bool = False
    reads_others: bool = False


DRAFTERS: dict[str, DrafterKind] = {
    "model": DrafterKind(
        "draft model, at every position", lambda parts: parts.model(), runs_model=True, branches=True
    ),
    "prompt_lookup": DrafterKind(
        "prompt lookup: copies from the text so far", lambda parts: parts.prompt_lookup(), copies=True
    ),
    "sibling_lookup": DrafterKind(
        "lookup in all texts of the batch", lambda parts: parts.siblings(), copies=True, reads_others=True
    ),
    "ngram": DrafterKind("n-gram table", lambda parts: parts.ngrams(), needs_ngrams=True),
    "lookup": DrafterKind(
        "prompt lookup, else n-gram table",
        lambda parts: LookupChain(parts.prompt_lookup(), parts.ngrams()),
        needs_ngrams=True,
        copies=True,
    ),
    "cascade": DrafterKind(
        "prompt lookup, else draft model",
        lambda parts: parts.cascade(),
        runs_model=True,
        copies=True,
        branches=True,
    ),
    "adaptive": DrafterKind(
        "prompt lookup, else draft head while it is confident",
        lambda parts: parts.cascade(CONFIDENCE),
        runs_model=True,
        needs_head=True,
        copies=True,
        stops_when_unsure=True,
        branches=True,
    ),
    "window": DrafterKind(
        "the target, seeing the first tokens and the last", lambda parts: parts.window(), windows=True
    ),
    "window_cascade": DrafterKind(
        "prompt lookup, else the target seeing few tokens",
        lambda parts: parts.window_cascade(),
        copies=True,
        windows=True,
    ),
    "window_model": DrafterKind(
        "draft model for the target seeing few tokens",
        lambda parts: parts.window_model(),
        runs_model=True,
        windows=True,
    ),
}


def choose_drafter(pair: ModelPair, drafter: Any) -> Any:
    """The name, or the drafter object, that a request will use. Raises RequestError for what can't be."""
    if drafter == "auto":
        drafter = pair.default_drafter
        if drafter == "auto":
            drafter = "model" if pair.draft is not None else "prompt_lookup"
    kind = DRAFTERS.get(drafter) if isinstance(drafter, str) else None
    if kind is None:
        if not hasattr(drafter, "propose"):
            raise RequestError(
                f"drafter must be auto, {', '.join(DRAFTERS)} or a drafter object; got {drafter!r}."
            )
        refuse_old_names(drafter)
        return drafter
    if kind.runs_model and pair.draft is None:
        raise RequestError(
            f'This pair has no draft model for drafter="{drafter}": choose drafter="prompt_lookup" or load one '
            "with draft=."
        )
    if kind.needs_head and not isinstance(pair.draft, DraftHead):
        raise RequestError(
            f'drafter="{drafter}" needs a draft head, and this pair drafts with a model: choose "cascade".'
        )
    if kind.needs_ngrams and pair.ngrams is None:
        raise RequestError(f'This pair has no n-gram table for drafter="{drafter}": choose "prompt_lookup".')
    return drafter


def confident_prefix(max_probs: list[float], token_probs: list[float]) -> int:
    """How many of a row's drafts AMUSD verifies: while theirs times q's largest value is AHEAD_CONFIDENCE or more.

    max_probs[i], token_probs[i]: q's largest value at draft i, and q of the token drawn there. Whether a draft is
    verified never depends on which token was drawn there, so it is distributed as q says.
    """
    chance = 1.0
    for count, (top, own) in enumerate(zip(max_probs, token_probs, strict=True)):
        if not chance * top >= AHEAD_CONFIDENCE:  # nor behind a q that is no number
            return count
        chance *= own
    return len(max_probs)


def runs_model(drafter: Any) -> bool:
    """Whether the drafter, a name or an object, keeps a cache of the pair's draft."""
    return isinstance(drafter, str) and DRAFTERS[drafter].runs_model


def windows(drafter: Any) -> bool:
    """Whether the target drafts for itself, over part of its own cache, with this drafter, a name or an object."""
    return isinstance(drafter, str) and DRAFTERS[drafter].windows


def branches(drafter: Any, tree: tuple[int, ...] | None) -> bool:
    """Whether the drafter, a name or an object, proposes trees: a named one where it is given a shape."""
    return tree is not None if isinstance(drafter, str) else bool(getattr(drafter, "branches", False))


def reads_others(drafter: Any) -> bool:
    """Whether the drafter, a name or an object, may draft for a row by what other rows have written."""
    if isinstance(drafter, str):
        return DRAFTERS[drafter].reads_others
    return bool(getattr(drafter, "reads_others", True))


def make_drafter(drafter: Any, parts: Parts) -> Drafter:
    """A fresh drafter by its name, or a copy of a drafter object."""
    return DRAFTERS[drafter].make(parts) if isinstance(drafter, str) else own_drafter(drafter)
