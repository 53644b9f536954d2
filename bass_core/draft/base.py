"""What a decoder asks of a drafter, and what a drafter proposes.

Contract: `propose` returns up to max_drafts[r] tokens for each row of the batch and, where they were drawn from a
model, the distributions they were drawn from. What is proposed never changes what the decoder writes, only how
fast it writes. A drafter follows the decoder's rows: they are 0..B-1, and the last row takes the place of one that
leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.plan import MOST_TREE

from ..errors import RequestError
from ..length.base import Offer
from ..machine.transfer import to_host
from ..model.prefill import PrefillSteps
from ..sample.noise import NoiseKeys
from ..sample.rows import copied
from ..sequence import Sequence, WindowWork

# The source of drafts that were copied from a text.
COPY = "copy"


@dataclass
class Proposal:
    """What a drafter proposes for one round: chains, in which each draft follows the one before it.

    tokens int64 [B, N]: the first num_drafted[r] of row r are drafts, the rest is padding. probs float32 [B, N, V]
    are what each draft was drawn from; None: drafts are point masses.

    max_probs, token_probs float32 [B, N]: the largest value of what a draft was drawn from, and the token's own,
    from a drafter that was made to tell them (HeadDrafter). windowed: what the drafts cost the target itself.

    sources[r]: who drafted row r (Drafter.source), from a drafter that asks several. own: under greedy decoding,
    gives each draft's probability at temperature 1 by row, None where it has none. None: not known.
    """

    tokens: Tensor
    num_drafted: list[int]
    probs: Tensor | None = None
    max_probs: Tensor | None = None
    token_probs: Tensor | None = None
    windowed: WindowWork | None = None
    sources: list[str] | None = None
    own: Callable[[], list[list[float | None]]] | None = None

    @property
    def copied(self) -> list[bool]:
        """By row, whether `sources` says that its drafts were copied."""
        return [source == COPY for source in self.sources or [""] * len(self.num_drafted)]


@dataclass
class TreeProposal(Proposal):
    """What a drafter that `branches` proposes: trees of drafts.

    parents[r], num_drafted[r] of them: the index of the draft that each draft follows, below its own, or -1 for
    the newest token of the text. At most one child of a draft was drawn, from the row drawn[r][i] of probs float32
    [D, V], which is 0 at its siblings; the others have -1 there: they are a function of the text before them.
    Under coupling, where q decides nothing, all may name theirs. drawn None: no draft was drawn.
    """

    parents: list[list[int]] = field(default_factory=list)
    drawn: list[list[int]] | None = None


class Drafter(Protocol):
    """What a decoder asks of a drafter; a subclass writes `propose` and what it needs of the rest.

    branches: whether it proposes trees, of which max_drafts[r] says how deep they may be: every proposal of such a
    drafter is a TreeProposal, and is judged by the tree rule; no other drafter may give one. observes_states:
    whether it wants the target's hidden states (`observe_states`). raw_states: whether those
    may come as they are, for HiddenStateTap.finish. calls: forwards of a draft model so far.
    drafted: tokens so far that a draft model drew and that were proposed; copies are not counted. A target that
    drafts for itself counts as a draft model in both. source: who drafts, for a reader. tells: whether
    a greedy proposal is to have its `own`. reads_others: whether it may draft for a row by what
    other rows have written; rows with one noise key are then refused.
    """

    source: str = "drafter"
    tells: bool = False
    reads_others: bool = True

    observes_states: bool = False
    raw_states: bool = False
    branches: bool = False
    calls: int = 0
    drafted: int = 0

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        """Begin with these rows; the prefill of a draft model, where there is one."""
        return None

    def prepare(self, rows: int) -> None:
        """Before the first step, off the clock: make ready what the first rounds need."""
        return None

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts: a part of the prefill, if the first round drafts. Else they are read when one does."""
        return None

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """What each row could draft next, and by whom: by what was written so far, before anything is drawn."""
        return plain_offers(rows, self.source)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        """At most max_drafts[r] tokens for row r."""
        ...

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """The rows have written accepted[r] drafts of the proposal and the token after them.

        Those are the first ones, or a path of the tree.
        """
        return None

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """states[r] [k, hidden]: of the k tokens of row r that have newly entered the target's cache for good.

        They are what the target's forward reads out (HiddenStateTap in model/base.py): its last hidden states,
        unless the pair's draft head asks for others. They are valid until the target's next forward.
        """
        return None

    def rewind(self, row: int, length: int) -> None:
        """The tokens of row `row` from `length` on were taken back, as AMUSD does; none of its prompt ever is."""
        return None

    def move_row(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`, which has left."""
        return None


def plain_offers(rows: list[Sequence], source: str) -> list[Offer]:
    """Offers of as many drafts as each row has room for: the target adds a token of its own."""
    return [Offer(row.remaining - 1, source, row=row.id) for row in rows]


def own_drafter(drafter: Any) -> Drafter:
    """A copy of a user's drafter, to which whatever it leaves out of `Drafter` is added.

    A drafter that does not say whether it observes states does so if it has a method `observe_states`.
    """
    made: Any = copy.deepcopy(drafter)
    if not hasattr(made, "observes_states"):
        made.observes_states = hasattr(made, "observe_states")
    if not hasattr(made, "offers"):
        made.offers = partial(plain_offers, source=getattr(made, "source", Drafter.source))
    for name, default in vars(Drafter).items():
        if not name.startswith("_") and not hasattr(made, name):
            # Not bound to the drafter, which would then hold itself: the defaults use nothing of it.
            setattr(made, name, partial(default, None) if callable(default) else default)
    checked: Drafter = made
    return checked


def sources_of(proposal: Proposal, drafter: Drafter | None) -> list[list[str]]:
    """Who proposed each draft, by row."""
    whole = Drafter.source if drafter is None else drafter.source
    rows = proposal.sources or [whole] * len(proposal.num_drafted)
    return [[source] * count for source, count in zip(rows, proposal.num_drafted, strict=True)]


class OwnChances:
    """Keeps what a model drafts by, for the probabilities of its greedy drafts; nothing unless `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, logits: Tensor, drafts: Tensor) -> None:
        """Copy the logits [B, V], which the model's next forward may overwrite, with the drafts' columns [B]."""
        if self.wanted:
            self._kept.append((copied(logits), drafts))

    def own(self, width: int) -> Callable[[], list[list[float | None]]] | None:
        """The `own` of a proposal of `width` drafts a row."""
        kept = self._kept[:width]
        return (lambda: _chances(kept)) if kept else None


def _chances(kept: list[tuple[Tensor, Tensor]]) -> list[list[float | None]]:
    columns = [
        (logits.float().gather(1, drafts[:, None]) - logits.float().logsumexp(-1, keepdim=True)).exp()
        for logits, drafts in kept
    ]
    rows: list[list[float | None]] = to_host(torch.cat(columns, dim=1)).tolist()
    return rows


def point_masses(rows: list[list[int]]) -> Proposal:
    """A proposal, on the host, of tokens that were copied: rows[r] for row r."""
    num_drafted = [len(tokens) for tokens in rows]
    width = max(num_drafted)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in rows]
    return Proposal(torch.tensor(padded, dtype=torch.long).view(len(rows), width), num_drafted)


def check_type(proposal: Proposal, branches: bool) -> Proposal:
    """The proposal; raises RequestError where it is not of its drafter's type, or is a tree that can't be
    verified.

    The type, and with it the rule, is known before anything is drawn.
    """
    if not isinstance(proposal, TreeProposal):
        if branches:
            raise RequestError(
                "The drafter has branches = True and proposed a chain: let it return a TreeProposal in every "
                "round, or leave branches out."
            )
        return proposal
    if not branches:
        raise RequestError(
            "The drafter proposed a tree of tokens where only chains are verified: let it return a Proposal, or "
            "give it the attribute branches = True."
        )
    counts, rows = proposal.num_drafted, proposal.parents
    if not (isinstance(rows, list) and len(rows) == len(counts) and all(map(_is_tree, rows, counts))):
        raise RequestError(
            "The parents of a tree must be lists, one a row, with one number a draft, from -1 to below the "
            f"draft's own index, for at most {MOST_TREE - 1} drafts a row; got {rows}."
        )
    return proposal


def _is_tree(parents: object, count: int) -> bool:
    """Whether these are the parents of a tree of so many drafts."""
    if not isinstance(parents, list) or not count == len(parents) < MOST_TREE:
        return False
    return all(-1 <= parent < i for i, parent in enumerate(parents))
