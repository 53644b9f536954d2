"""Chains or trees of drafts in one CUDA graph, from the tokens that a model has not read yet to its last draft.

`ChainGraphs.replay` feeds every row's unread tokens and drafts equally deep in each (trees: tree_graph.py). A
round sends one packed tensor of numbers to the device and reads nothing. A `ChainModel` computes the logits inside
the graph: a draft head (head/captured.py) or a draft model (model_graph.py). Rows that draft nothing are fed too,
which costs no more.

Graphs that `advance` can draft a round before the outcomes of the last one are on the host (`ChainGraphs.repeat`):
they read these outcomes, and their own drafts, in a buffer on the device, and make the round's numbers from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.backends import captured_extent
from kernels.plan import MAX_TREE_TOKENS, TreeMask

from ..machine.transfer import to_device
from ..model.forward import CapturedBatch, ForwardOutput
from ..model.graphs import LEVELS, GraphRunner, captured_level
from ..model.static_step import CapturedStep, Padded, RoundInputs
from ..sample.noise import NoiseKeys, Role, RowKeys
from ..sample.params import SamplingParams
from ..verify.tree_shape import TreeShape
from .base import Drafter, Proposal, listed
from .chain import ChainSampler, Level, Levels
from .tree import TreePlanner
from .tree_graph import full_tree, grow, proposal_of, spread

# The most tokens of a row that one graph feeds.
MAX_UNREAD = 17


class GraphChains(NamedTuple):
    """The drafts of a graph.

    Attributes:
        tokens: int64 [B, l], the drafts of chains; or [B, N], those of trees.
        probs: float32 [B, l, V], the distributions that they were drawn from; for trees as in `proposal_of`.
            None for greedy drafts.
        chances: float32 [B, l] or [B, N], each greedy draft's probability at temperature 1, if wanted.
        tree: the trees' shape; None for chains.
    """

    tokens: Tensor
    probs: Tensor | None
    chances: Tensor | None
    tree: TreeShape | None = None

    def proposal(self, most: list[int]) -> Proposal:
        """Return the drafts of each row's first most[r] levels; those are all there are of a chain."""
        if self.tree is None:
            width = max(most)
            probs = None if self.probs is None else self.probs[:, :width]
            proposal = Proposal(self.tokens[:, :width], list(most), probs)
        else:
            proposal = proposal_of(self.tree, self.tokens, self.probs, most)
        if self.chances is not None:
            proposal.greedy_probs = partial(listed, self.chances, proposal.num_drafted)
        return proposal


class ChainInput(NamedTuple):
    """What a ChainModel reads in a graph, for R rows.

    Attributes:
        tokens: int64 [R, W], each row's unread tokens, then padding.
        starts: int64 [R], the position of each row's first one.
        counts: int64 [R], how many they are.
        ends: int64 [R], the positions of the first drafts.
        prompts: int64 [R], the length of each row's prompt.
        state_slots: int64 [R, W], those that `replay` was given for the tokens, then padding; or None.
        forward: feeds ids [R, S] or embeddings [R, S, hidden] at positions int64 [R], or as a level of trees.
        tree: the shape of the drafts; None for chains.
        sees: the bits of `tree` on the device.
    """

    tokens: Tensor
    starts: Tensor
    counts: Tensor
    ends: Tensor
    prompts: Tensor
    state_slots: Tensor | None
    forward: Callable[..., ForwardOutput]
    tree: TreeShape | None
    sees: Tensor | None

    def write(self, text: Tensor) -> None:
        """Write the unread tokens to texts [R, T]. Padding lies after a text's end, and nothing reads it."""
        text.scatter_(
            1, self.starts[:, None] + torch.arange(self.tokens.shape[1], device=text.device), self.tokens
        )

    def feed(self, x: Tensor, level: Level, depth: int) -> ForwardOutput:
        """Feed a level (Feed in chain.py)."""
        if self.tree is None or self.sees is None:
            return self.forward(x, self.ends + depth)
        return self.forward(x, self.ends + self.tree.firsts[depth], self.tree.level(depth, len(x), self.sees))

    def newest(self, values: Tensor) -> Tensor:
        """Return the values [R, ...] of each row's last unread token, of values [R, W, ...]."""
        rows = torch.arange(len(self.counts), device=values.device)
        return values[rows, (self.counts - 1).clamp(min=0)]


class ChainModel(Protocol):
    """The model of a captured chain. It must not refer to a runner, which its graphs outlive."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V'], the token id of each column of its logits. None: all of the target's ids, in order."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """The captured widths: a round's unread tokens are fed in the narrowest that holds them."""
        ...

    @property
    def reads_states(self) -> bool:
        """Whether its forwards have to return hidden states."""
        ...

    @property
    def key(self) -> tuple[Any, ...]:
        """What its graphs depend on. Models with equal keys share graphs."""
        ...

    def most_kept(self, levels: int) -> int:
        """Return how many drafts of a round of `levels` levels stay in the cache if all are accepted."""
        ...

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that its graphs have to keep alive."""
        ...

    def logits(self, unread: ChainInput) -> Levels:
        """Feed the unread tokens and yield logits [R, W, V']."""
        ...


class ChainGraphs:
    """Drafts chains in graphs that belong to the cache of `runner`.

    Args:
        runner: runs the model.
        model: computes the logits.
        size: V, the size of the target's vocabulary.
        params: how drafts are sampled.
        role: their noise.
        reports: whether greedy chains come with their probabilities. Greedy trees always do.
        trees: chooses the drafts of trees. None: chains.
        advances: whether `repeat` may be called.
    """

    def __init__(
        self,
        runner: GraphRunner,
        model: ChainModel,
        size: int,
        params: SamplingParams,
        role: Role,
        reports: bool,
        trees: TreePlanner | None = None,
        advances: bool = False,
    ) -> None:
        self.runner, self.model, self.size = runner, model, size
        self.params, self.role, self.reports = params, role, reports and params.greedy
        self.trees = trees
        self._sees: dict[TreeShape, Tensor] = {}
        # Each row's last outcome (accepted drafts, next token), then its drafts.
        self._last_round = (
            runner.buffer("last round", runner.cache.max_batch, 2 + LEVELS[-1], dtype=torch.long)
            if advances
            else None
        )
        # The last step, and how many columns its rows may have.
        self._step: CapturedStep | None = None
        self._limit = 0

    def fits(self, starts: list[int], counts: list[int], levels: int) -> bool:
        """Return whether a graph can feed counts[r] tokens after starts[r] and draft `levels` levels more."""
        unread, room = max(counts), self.runner.cache.room
        if not (0 < unread <= MAX_UNREAD and self.runner.captures):
            return False
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        tree = self._tree(levels)
        fed = levels if tree is None else tree.fed
        if self.trees is not None and fed > MAX_TREE_TOKENS:
            return False
        return room(starts) >= self._width(unread) and room(ends) >= fed

    def _width(self, unread: int) -> int:
        return next(width for width in self.model.widths if width >= unread)

    def _tree(self, levels: int) -> TreeShape | None:
        """Return the trees of that many levels, or None for chains."""
        if self.trees is None or not levels:
            return None
        vocabulary = self.model.vocabulary
        return full_tree(self.trees, levels, self.runner.vocab if vocabulary is None else len(vocabulary))

    def replay(
        self,
        levels: int,
        starts: list[int],
        unread: list[list[int]],
        prompts: list[int],
        keys: RowKeys,
        state_slots: list[list[int]] | None = None,
    ) -> GraphChains | None:
        """Feed unread[r] after the first starts[r] tokens of row r and draft `levels` levels in each row.

        Args:
            levels: the drafts of a chain, padded to the next of LEVELS if that fits, or how deep a tree is.
            starts: how many tokens of each row have been fed.
            unread: the tokens to feed.
            prompts: the lengths of the prompts.
            keys: the round's noise keys.
            state_slots: where the state before each unread token is, if the model reads states.

        Returns:
            The drafts, valid until the next call; None if this graph can't be captured.
        """
        runner, batch, counts = self.runner, len(starts), list(map(len, unread))
        last_round, most_kept = None, self.model.most_kept(levels)
        if 0 < levels <= LEVELS[-1]:
            last_round = self._last_round
        width, ends = self._width(max(counts)), [a + b for a, b in zip(starts, counts, strict=True)]
        if self.trees is None and levels <= LEVELS[-1] and runner.cache.room(ends) >= captured_level(levels):
            levels = captured_level(levels)
        inputs = runner.placed(
            RoundInputs(
                lengths=starts,
                counts=counts,
                prompts=prompts,
                ids=keys.host_ids,
                positions=keys.host_positions,
                seeds=[keys.seed] * batch,
                tokens=Padded(unread, width),
                state_slots=None if state_slots is None else Padded(state_slots, width),
                turns=None if last_round is None else [1] * batch,
                most_kept=None if last_round is None else [most_kept] * batch,
            )
        )
        tree, sees = self._tree(levels), None
        if tree is not None:
            if tree not in self._sees:
                self._sees[tree] = to_device(tree.sees, runner.device)
            sees = self._sees[tree]
        room, columns, fed = runner.cache.room, runner.cache.max_len, levels if tree is None else tree.fed
        filled = columns - min(room(starts) - width, room(ends) - fed)
        rows = runner.captured_rows(batch)
        extent = captured_extent(runner.backend, filled, columns)
        drawn = not self.params.greedy and levels > 0
        probs = runner.draft_probs(rows, fed + (tree is not None), self.size) if drawn else None
        if drawn and probs is None:
            return None
        graph = _Graph(
            self.model, self.params, self.role, self.reports, self.size, levels, extent, runner.vocab, tree,
            last_round is not None,
        )  # fmt: skip
        step = runner.call(
            ("chain", self.model.key, width, *graph[1:]),
            inputs,
            rows,
            graph.make_function(runner, probs, self.trees, sees, last_round),
            keep_alive=lambda: [*self.model.tensors, *([] if sees is None else [sees])],
            shared=("probs",) if drawn else (),
        )
        if step is None:
            return None
        self._step, self._limit = step, extent - max(width, fed)
        tokens, chances = step.output
        probs, chances = (None if each is None else each[:batch] for each in (probs, chances))
        return GraphChains(tokens[:batch], probs, chances, tree)

    def repeats(self, lengths: list[int], written: int) -> bool:
        """Return whether `repeat` can draft after texts of these lengths and at most `written` more tokens."""
        columns = self.runner.cache.max_len
        return columns - self.runner.cache.room(lengths) + written <= self._limit

    def repeat(self, packed: Tensor) -> None:
        """Draft again as in the last call of `replay`, after a round of the outcomes `packed` (Judged)."""
        assert self._last_round is not None and self._step is not None
        self._last_round[: len(packed), :2].copy_(packed[:, :2])
        self._step.replay()

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the graphs of `levels` levels, for all numbers of unread tokens."""
        zeros, keys = [0] * rows, RowKeys(0, [0] * rows, [0] * rows, self.runner.device)
        for width in self.model.widths:
            unread = [[0] * width] * rows
            self.replay(levels, zeros, unread, zeros, keys, unread if self.model.reads_states else None)


class GraphDrafter(Drafter):
    """A drafter whose graphs can draft a round ahead (`propose_again`).

    Attributes:
        _graphs: its graphs, made by `start`.
        _newest: the last proposal that they made.
    """

    can_advance = True
    _graphs: ChainGraphs
    _newest: Proposal | None = None

    def propose_again(self, proposal: Proposal, packed: Tensor, states: Tensor | None) -> Proposal:
        self._graphs.repeat(packed)
        self.calls += proposal.width
        self.drafted += sum(proposal.num_drafted)
        return proposal


def _advance(inputs: RoundInputs, accepted: Tensor, newest: Tensor, drafts: Tensor) -> None:
    """Make a round's numbers from those of the round before, in rows whose numbers the host didn't write.

    Args:
        accepted, newest: int64 [R, 1], the accepted drafts of the round before, and the token after them.
        drafts: int64 [R, L], the drafts of that round, then anything.
    """
    later, width = (inputs.turns > 1)[:, None], inputs.tokens.shape[1]
    kept = torch.minimum(accepted, inputs.most_kept[:, None])
    # Surplus rows have 0 and stay as they are.
    inputs.turns.copy_((2 * inputs.turns).clamp(max=2))
    inputs.lengths.add_(((inputs.counts[:, None] + kept) * later)[:, 0])
    inputs.positions.add_(((accepted + 1) * later)[:, 0])
    # While a graph is made, the buffer may have a round of more drafts.
    counts = (accepted + 1 - kept).clamp(max=width)
    inputs.counts.copy_(counts.where(later, inputs.counts[:, None])[:, 0])
    # The round wrote its accepted drafts and one more token, of which the model has not read those after `kept`.
    at = kept + torch.arange(width, device=kept.device)
    # A token that was chosen from unsound numbers has no embedding (Judge.advance).
    written = drafts.gather(1, at.clamp(max=drafts.shape[1] - 1)).where(at < accepted, newest.clamp(min=0))
    inputs.tokens.copy_(written.masked_fill(at > accepted, 0).where(later, inputs.tokens))
    if inputs.state_slots is not None:
        inputs.state_slots.copy_(at.where(later, inputs.state_slots))


class _Graph(NamedTuple):
    """What a captured chain depends on; `make_function` makes the function to capture."""

    model: ChainModel
    params: SamplingParams
    role: Role
    reports: bool
    size: int
    levels: int
    extent: int
    vocab: int
    tree: TreeShape | None
    advances: bool

    def make_function(
        self,
        runner: GraphRunner,
        probs: Tensor | None,
        trees: TreePlanner | None,
        sees: Tensor | None,
        last_round: Tensor | None,
    ) -> Callable[[RoundInputs], tuple[Tensor, Tensor | None]]:
        """Return a function of a round's inputs that returns drafts and chances, and writes to `probs`."""
        # Keep only what outlives the runner.
        model, cache, backend = runner.model, runner.cache, runner.backend

        def chain(inputs: RoundInputs) -> tuple[Tensor, Tensor | None]:
            def forward(x: Tensor, lengths: Tensor, tree: TreeMask | None = None) -> ForwardOutput:
                batch = CapturedBatch(x, lengths, self.extent, self.model.reads_states, inputs.prefix, tree=tree)
                output = model.forward_captured(batch, cache, backend)
                output.logits = output.logits[..., : self.vocab]
                return output

            last = None if last_round is None else last_round[: len(inputs.lengths)]
            if last is not None:
                _advance(inputs, last[:, :1], last[:, 1:2], last[:, 2:])
            starts, slots = inputs.lengths, inputs.state_slots
            unread = ChainInput(
                inputs.tokens.contiguous(), starts, inputs.counts, starts + inputs.counts, inputs.prompts,
                None if slots is None else slots.contiguous(), forward, self.tree, sees,
            )  # fmt: skip
            if self.tree is None or trees is None:
                drafts, chances = self._draw(unread, inputs.keys, probs)
                if last is not None:
                    last[:, 2 : 2 + self.levels].copy_(drafts)
                return drafts, chances
            levels = self.model.logits(unread)
            drafts, chances = grow(trees, self.tree, levels, self.model.vocabulary, inputs.keys, probs)
            return drafts, chances if self.params.greedy else None

        return chain

    def _draw(self, unread: ChainInput, keys: NoiseKeys, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        vocabulary, tokens, chances = self.model.vocabulary, list[Tensor](), list[Tensor]()
        if probs is not None and vocabulary is not None:
            probs.zero_()
        levels, chains = self.model.logits(unread), ChainSampler(self.params, self.role, self.size, vocabulary)
        for i, step in enumerate(chains.steps(levels, next(levels), self.levels, keys)):
            tokens.append(step.tokens)
            if step.q is not None and probs is not None:
                spread(step.q, vocabulary, probs[:, i])
            elif self.reports:
                chances.append(step.chances)
        drafts = torch.stack(tokens, 1) if tokens else unread.tokens[:, :0]
        return drafts, torch.cat(chances, 1) if chances else None
