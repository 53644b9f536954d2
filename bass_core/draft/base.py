"""The interface of a drafter (`Drafter`) and of its proposals (`Proposal`, `TreeProposal`).

Proposals never change the distribution of what the decoder writes, only its speed.
A drafter follows the decoder's rows 0..B-1. When a row leaves, the last row takes its place (`move_row`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.plan import MAX_TREE_TOKENS
from kernels.support import is_accelerator

from ..errors import RequestError
from ..length.base import Offer, own_copy, whole_number
from ..machine.transfer import to_host
from ..model.forward import ForwardOutput
from ..model.prefill import PrefillSteps
from ..model.static_step import GraphDrafts
from ..sample.distribution import ColumnProbs, Probs, dense
from ..sample.noise import NoiseKeys
from ..sample.rows import RaggedRows, padded, pick
from ..sequence import Sequence, WindowWork
from ..verify.detail import Drafts
from ..verify.judge import Judge
from ..verify.tree_judge import TreeJudge
from ..verify.tree_shape import TreeShape

# The source of drafts that were copied from the text.
COPY = "copy"
# The source of drafts that a grammar makes certain (draft/forced.py).
GRAMMAR = "grammar"


@dataclass
class Proposal:
    """A drafter's proposal for one round: one chain per row, in which each draft follows the one before it.

    Attributes:
        tokens: int64 [B, N]. The first num_drafted[r] tokens of row r are drafts, the rest is padding.
        num_drafted: drafts per row.
        probs: float32 [B, N, V], the distribution that each draft was drawn from, or the same as ColumnProbs. None
            if the drafts are point masses.
        max_probs: float32 [B, N], the largest value of each draft's distribution, or None. Only for AMUSD
            (AheadHeadDrafter).
        token_probs: float32 [B, N], the probability of each draft in its distribution, or None. Only for AMUSD.
        windowed: the target's work to draft these tokens with windowed forwards (window.py), or None.
        sources: for a drafter that combines several: the `source` of the one that drafted each row. None
            otherwise.
        greedy_probs: for greedy decoding, a function that returns each draft's probability at temperature 1, one
            list per row, with None for a draft without a probability. The attribute is None if the drafter does
            not report probabilities.
    """

    tokens: Tensor
    num_drafted: list[int]
    probs: Probs | None = None
    max_probs: Tensor | None = None
    token_probs: Tensor | None = None
    windowed: WindowWork | None = None
    sources: list[str] | None = None
    greedy_probs: Callable[[], list[list[float | None]]] | None = None

    @property
    def width(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def copied(self) -> list[bool]:
        """Whether the drafts of each row were copied, according to `sources`."""
        return [source == COPY for source in self.sources or [""] * len(self.num_drafted)]

    @property
    def tree_parents(self) -> list[list[int]] | None:
        """The parents of trees, as in TreeProposal; None for chains."""
        return None

    def judge(self, chains: Judge) -> Judge:
        """Return the judge of these drafts, given that of chains."""
        return chains

    def in_graph(self) -> GraphDrafts | None:
        """Return what a captured verification reads, or None if it has to be judged without one."""
        return None if isinstance(self.probs, ColumnProbs) else GraphDrafts(self.tokens, self.probs)

    def after_forward(self, output: ForwardOutput) -> Proposal:
        """Return the drafts to judge after the target's forward. Under AMUSD, one more may have come."""
        return self

    def explained(self, source: str) -> Drafts:
        """Return the drafts for `explain`; `source` drafted the rows without an entry in `sources`."""
        tokens = [row[:n] for row, n in zip(self.tokens.tolist(), self.num_drafted, strict=True)]
        names = zip(self.sources or [source] * len(tokens), tokens, strict=True)
        sources = [[name] * len(row) for name, row in names]
        return Drafts(tokens, sources, probs=dense(self.probs), greedy_probs=self.greedy_probs)


@dataclass
class TreeProposal(Proposal):
    """The proposal of a drafter that `branches`: one tree of drafts per row.

    At most one child of each draft is drawn at random. Its siblings must depend only on the tokens before them.
    For example, parents [-1, -1, 0] are two candidates for the next token and one draft after the first of them.

    Attributes:
        parents: for each draft of each row, the index of its parent, or -1 if the draft follows the newest token
            of the text. A parent's index is smaller than its child's.
        drawn: for each draft, the index into `probs` (here float32 [D, V]) of the distribution that it was drawn
            from, or -1 if it was not drawn. That distribution gives the draft's siblings probability 0. Under
            coupling, which ignores q, every draft may have an index. `drawn` is None if no draft was drawn.
        shape: the full tree of which each row has the first drafts, with that tree's `drawn`. Only our captured
            drafters set it, because their rounds are judged without a look at `parents` and `drawn`.
    """

    parents: list[list[int]] = field(default_factory=list)
    drawn: list[list[int]] | None = None
    shape: TreeShape | None = field(default=None, init=False)

    @property
    def tree_parents(self) -> list[list[int]]:
        return self.parents

    def judge(self, chains: Judge) -> Judge:
        return TreeJudge(chains.sampling, chains.verification, chains.synthetic, self.shape)

    def in_graph(self) -> GraphDrafts | None:
        if self.shape is None:
            return None
        probs = dense(self.probs)
        q = None if probs is None else probs.view(len(self.num_drafted), -1, probs.shape[-1])
        return GraphDrafts(self.tokens, q)

    def explained(self, source: str) -> Drafts:
        return replace(super().explained(source), parents=self.parents, drawn=self.drawn)


class Drafter(Protocol):
    """The interface of a drafter. A subclass needs only `propose`.

    Attributes:
        source: a name for the drafter, for display.
        report_probs: set this if greedy proposals should report the drafts' probabilities
            (`Proposal.greedy_probs`).
        is_user_object: whether its class is a user's, so that its proposals are checked (`check_proposal`).
        reads_others: whether the drafts of a row may depend on other rows' texts. Rows with equal noise keys are
            then refused if this is True.
        observes_states: whether `observe_states` needs the target's hidden states.
        raw_states: whether `observe_states` accepts raw states, which HiddenStateTap.finish has not processed.
        reads_early: whether it reads the prompts during the prefill even if the first round drafts nothing, as
            long as later rounds may.
        merges: whether its proposals merge copies into a model's drafts in a captured round (MergedProposal).
        can_advance: whether it can propose a round before the outcomes of the last one are on the host
            (`propose_again`).
        advances: whether it has to; set before `start`.
        branches: whether it proposes trees. Every proposal is then a TreeProposal, verified by the tree rule, and
            max_drafts[r] limits a tree's depth. Other drafters may not propose trees.
        calls: forwards of a draft model so far, including those of a target that drafts for itself.
        drafted: proposed tokens so far that were drawn by a model; copied tokens don't count.
    """

    source: str = "drafter"
    report_probs: bool = False
    is_user_object: bool = False
    reads_others: bool = True

    observes_states: bool = False
    raw_states: bool = False
    reads_early: bool = False
    merges: bool = False
    can_advance: bool = False
    advances: bool = False
    branches: bool = False
    calls: int = 0
    drafted: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.is_user_object = cls.__module__.partition(".")[0] != __name__.partition(".")[0]

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        """Begin with these rows. Return the prefill of the draft model if there is one."""
        return None

    def prepare(self, rows: int) -> None:
        """Prepare the first rounds. Called before the first step, outside the measured time."""
        return None

    def prepare_chains(self, rows: int, longest: int) -> None:
        """Prepare rounds of `longest` drafts per row (for trees: levels). Called after `prepare`."""
        return None

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts as part of the prefill, if the first round drafts or the drafter `reads_early`."""
        return None

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Return, for each row, the number of tokens that could be drafted next and the source that drafts them.

        This may depend only on the text so far.
        """
        return plain_offers(rows, self.source)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        """Propose at most max_drafts[r] tokens for row r, or a tree at most that deep."""
        ...

    def repeats(self, rows: list[Sequence], proposal: Proposal) -> bool:
        """Return whether `propose_again` can follow this proposal for these texts, which don't have its round."""
        return False

    def propose_again(self, proposal: Proposal, packed: Tensor, states: Tensor | None) -> Proposal:
        """Propose as many tokens as in the last round, whose outcomes and states are only on the device.

        Args:
            proposal: that of the last round, whose tensors may be overwritten.
            packed: its outcomes, as in Judged.
            states: [B, 1 + N, ...], the target's states of the round, if the drafter observes states.
        """
        return proposal

    def on_repeated(self, rows: list[Sequence]) -> None:
        """Note that the texts now have the round before the last one that was proposed by `propose_again`."""
        return None

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """React to a verification: row r wrote accepted[r] drafts of the proposal and one more token.

        The accepted drafts are the first ones of a chain, or a path of a tree.
        """
        return None

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Take the target's states of the k tokens just committed to its cache, states[r] [k, hidden] for row r.

        These are the target's last hidden states, unless the pair's draft head asks for others (HiddenStateTap in
        model/base.py). They are valid until the target's next forward.
        """
        return None

    def rewind(self, row: int, length: int) -> None:
        """Drop a row's tokens from index `length` on, because AMUSD took them back. The prompt always stays."""
        return None

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`, which has left."""
        return None


class CommittedStates(Seq[Tensor]):
    """The states of each row's newest token and accepted drafts, copied when they are first read.

    Attributes:
        states: [B, 1 + N, ...], those of the whole step.
        columns: the columns of each row's newest token and accepted drafts, ascending.
    """

    def __init__(self, states: Tensor | RaggedRows, columns: Seq[Seq[int]]) -> None:
        self._states, self.columns = states, columns

    @property
    def states(self) -> Tensor:
        """[B, 1 + N, ...], the states of the whole step."""
        return padded(self._states)

    @cached_property
    def by_row(self) -> Seq[Tensor]:
        """Copies of each row's states, [k, ...]."""
        states = self._states
        if isinstance(states, RaggedRows):
            flat, firsts = states.rows, states.firsts[:-1]
        else:
            flat, firsts = states.flatten(0, 1), [row * states.shape[1] for row in range(len(states))]
        places = [first + column for first, row in zip(firsts, self.columns, strict=True) for column in row]
        by_row: Seq[Tensor] = pick(flat, places).split([len(row) for row in self.columns])
        return by_row

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, row: Any) -> Any:
        return self.by_row[row]


def plain_offers(rows: list[Sequence], source: str) -> list[Offer]:
    """Offer each row one draft less than it has tokens left, because the target adds a token."""
    return [Offer(row.remaining - 1, source, row=row.id) for row in rows]


def wrap_user_drafter(drafter: Any) -> Drafter:
    """Return a deep copy of a user's drafter, with defaults for the members of `Drafter` that it lacks.

    A drafter with a method `observe_states` observes states, unless its attribute `observes_states` is False.
    """
    wrapped: Any = own_copy(drafter, "drafter")
    wrapped.is_user_object = True
    if not hasattr(wrapped, "observes_states"):
        wrapped.observes_states = hasattr(wrapped, "observe_states")
    if not hasattr(wrapped, "offers"):
        wrapped.offers = partial(plain_offers, source=getattr(wrapped, "source", Drafter.source))
    for name, default in vars(Drafter).items():
        if not name.startswith("_") and not hasattr(wrapped, name):
            # Bind None as `self`: the defaults don't use it, and a bound method would keep the drafter alive.
            setattr(wrapped, name, partial(default, None) if callable(default) else default)
    checked: Drafter = wrapped
    return checked


def listed(probs: Tensor, counts: list[int]) -> list[list[float | None]]:
    """Return the probabilities [B, N] of each row's first counts[r] drafts; waits for the device."""
    return [list(row[:count]) for row, count in zip(to_host(probs).tolist(), counts, strict=True)]


def point_masses(rows: list[list[int]]) -> Proposal:
    """Return a proposal of copied tokens, rows[r] for row r, on the host."""
    num_drafted = [len(tokens) for tokens in rows]
    width = max(num_drafted)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in rows]
    return Proposal(torch.tensor(padded, dtype=torch.long).view(len(rows), width), num_drafted)


def no_drafts(num_drafted: list[int], device: torch.device) -> Proposal:
    """Return a proposal of zero drafts per row."""
    return Proposal(torch.zeros(len(num_drafted), 0, dtype=torch.long, device=device), num_drafted)


@contextmanager
def texts_unchanged(rows: list[Sequence]) -> Iterator[None]:
    """Refuse a user's drafter that changes the rows' texts in this block, e.g. by appending its drafts.

    Raises:
        RequestError: if it does: the target would read the changed text.
    """
    before = [list(row.tokens) for row in rows]
    yield
    for row, tokens in zip(rows, before, strict=True):
        if row.tokens != tokens:
            raise RequestError(
                f"The drafter changed the tokens of row {row.index}: let it work on a copy, list(row.tokens)."
            )


def check_proposal(proposal: Proposal, max_drafts: list[int], vocab: int) -> None:
    """Check the proposal of a user's drafter.

    Args:
        proposal: the value that `propose` returned.
        max_drafts: its argument, the maximum number of drafts per row (for a tree, of levels).
        vocab: the number of token ids.

    Raises:
        RequestError: if it can't be verified.
    """
    if not isinstance(proposal, Proposal):
        raise RequestError(
            f"The drafter's `propose` must return a Proposal; got {_kind(proposal)}: use point_masses(lists of "
            "tokens), or Proposal(tokens, num_drafted, probs)."
        )
    rows, tokens, counts, probs = len(max_drafts), proposal.tokens, proposal.num_drafted, proposal.probs
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.ndim != 2 or len(tokens) != rows:
        raise RequestError(
            f"A proposal's tokens must be an int64 tensor [{rows}, drafts], with a line per row; got "
            f"{_kind(tokens)}."
        )
    whole = list(map(whole_number, counts)) if isinstance(counts, list) else []
    proposal.num_drafted = [count for count in whole if count is not None]
    if len(whole) != rows or None in whole:
        raise RequestError(f"num_drafted must be a list of {rows} whole numbers, one per row; got {counts!r:.80}.")
    width, branches = tokens.shape[1], isinstance(proposal, TreeProposal)
    for r, count in enumerate(proposal.num_drafted):
        most = width if branches else min(max_drafts[r], width)
        if not 0 <= count <= most:
            raise RequestError(
                f"The drafter proposed {count} drafts for row {r}, which may have from 0 to {most}: "
                f"max_drafts[{r}] is {max_drafts[r]}, and `tokens` has {width} columns."
            )
    if width > max(max_drafts) and not branches:
        raise RequestError(
            f"A proposal's tokens may have at most max(max_drafts) columns, here {max(max_drafts)}; got {width}."
        )
    _check_probs(probs, ["D", vocab] if branches else [rows, width, vocab])
    if isinstance(proposal, TreeProposal):
        _check_tree(proposal)
    # On an accelerator, reading the tokens would wait for the device.
    if tokens.numel() and not is_accelerator(tokens.device):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab:
            raise RequestError(
                f"The drafter proposed the token {low if low < 0 else high}: token ids are from 0 to {vocab - 1}."
            )


def _check_probs(probs: object, shape: list[Any]) -> None:
    """Refuse probs of a wrong kind or shape, beyond which kernels would read; "D" stands for any number."""
    if probs is None or isinstance(probs, ColumnProbs):
        return
    found = list(probs.shape) if isinstance(probs, Tensor) and probs.is_floating_point() else []
    if len(found) != len(shape) or any(a != b for a, b in zip(found, shape, strict=True) if b != "D"):
        raise RequestError(
            f"A proposal's probs must be a tensor of floats [{', '.join(map(str, shape))}], whose last dimension "
            f"has one number per token id; got {_kind(probs)}."
        )


def _check_tree(tree: TreeProposal) -> None:
    """Refuse a user's tree whose `drawn` names no distribution. `check_type` checks the parents."""
    counts, most = tree.num_drafted, len(tree.probs) if isinstance(tree.probs, Tensor) else 0
    tree.parents = _whole_lists(tree.parents, counts) or tree.parents
    if tree.drawn is None:
        if most:
            raise RequestError(
                "The tree has probs, but no `drawn`, which says which of its drafts were drawn from them: add it, "
                "or leave probs out."
            )
        return
    drawn = _whole_lists(tree.drawn, counts)
    if drawn is None or not all(-1 <= place < most for row in drawn for place in row):
        got = repr(tree.drawn) if isinstance(tree.drawn, list) else _kind(tree.drawn)
        raise RequestError(
            "`drawn` of a tree must have one list per row, with one whole number per draft, from -1 to less than "
            f"{most}, the number of distributions in probs; got {got:.80}."
        )
    tree.drawn = drawn


def _whole_lists(rows: object, counts: list[int]) -> list[list[int]] | None:
    """Return lists of whole numbers as ints; None for anything else, or unless they have these lengths."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    whole = [[number for number in map(whole_number, row) if number is not None] for row in rows]
    return whole if [len(row) for row in whole] == [len(row) for row in rows] == counts else None


def _kind(value: object) -> str:
    """Return a value's kind for a message."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_type(proposal: Proposal, branches: bool) -> Proposal:
    """Return the proposal if its type, chain or tree, is the one that its drafter announced by `branches`.

    The type decides the verification rule, so it has to be known before anything is drawn.

    Raises:
        RequestError: if it is a chain instead of a tree or the reverse, or a tree that can't be verified.
    """
    if not isinstance(proposal, TreeProposal):
        if branches:
            raise RequestError(
                "The drafter has branches = True but proposed a chain: return a TreeProposal in every round, or "
                "remove branches."
            )
        return proposal
    if not branches:
        raise RequestError(
            "The drafter proposed a tree, but it has no attribute branches = True: set it, or return a Proposal."
        )
    counts, rows = proposal.num_drafted, proposal.parents
    if not (isinstance(rows, list) and len(rows) == len(counts) and all(map(_is_tree, rows, counts))):
        raise RequestError(
            "The parents of a tree must be one list per row, with one number per draft, from -1 to less than the "
            f"draft's own index, for at most {MAX_TREE_TOKENS - 1} drafts per row; got {rows}."
        )
    return proposal


def _is_tree(parents: object, count: int) -> bool:
    """Return whether these are the parents of a tree of `count` drafts."""
    if not isinstance(parents, list) or not count == len(parents) < MAX_TREE_TOKENS:
        return False
    return all(isinstance(parent, int) and -1 <= parent < i for i, parent in enumerate(parents))
