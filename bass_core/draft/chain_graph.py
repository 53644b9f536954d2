"""Chains or trees of drafts in one CUDA graph, from the tokens that a model has not read yet to its last draft.

`ChainGraphs.replay` feeds every row's unread tokens and drafts equally deep in each (trees: tree_graph.py). A
round sends one packed tensor of numbers to the device and reads nothing. A `ChainModel` computes the logits inside
the graph: a draft head (head/captured.py) or a draft model (model_graph.py). Rows that draft nothing are fed too,
which costs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.backends import captured_extent
from kernels.plan import MAX_TREE_TOKENS, TokenTree

from ..machine.transfer import to_device
from ..model.forward import CapturedBatch, ForwardOutput
from ..model.graphs import GraphRunner
from ..sample.distribution import argmax, probabilities
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, RowKeys, stream
from ..sample.params import SamplingParams
from ..verify.full_tree import FullTree
from .base import Proposal, listed
from .tree import StaticTrees
from .tree_graph import full_tree, grow, proposal_of, spread

# The most tokens of a row that one graph feeds, and the widths that are captured: a round's unread tokens are fed
# in the narrowest that holds them.
MAX_UNREAD = 17
WIDTHS = (2, 5, 9, MAX_UNREAD)


class Drafted(NamedTuple):
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
    tree: FullTree | None = None

    def proposal(self, most: list[int]) -> Proposal:
        """Return the drafts of each row's first most[r] levels; those are all there are of a chain."""
        if self.tree is None:
            proposal = Proposal(self.tokens, list(most), self.probs)
        else:
            proposal = proposal_of(self.tree, self.tokens, self.probs, most)
        if self.chances is not None:
            proposal.own = partial(listed, self.chances, proposal.num_drafted)
        return proposal


class Unread(NamedTuple):
    """A graph's input, for R rows.

    Attributes:
        tokens: int64 [R, W], each row's unread tokens, then padding.
        starts: int64 [R], the position of each row's first one.
        counts: int64 [R], how many they are.
        ends: int64 [R], the positions of the first drafts.
        prompts: int64 [R], the length of each row's prompt.
        places: int64 [R, W], the numbers that `replay` was given for the tokens, then padding; or None.
        forward: feeds ids [R, S] or embeddings [R, S, hidden] at positions int64 [R], or as a level of trees.
        tree: the shape of the drafts; None for chains.
        sees: the bits of `tree` on the device.
    """

    tokens: Tensor
    starts: Tensor
    counts: Tensor
    ends: Tensor
    prompts: Tensor
    places: Tensor | None
    forward: Callable[..., ForwardOutput]
    tree: FullTree | None
    sees: Tensor | None

    def write(self, text: Tensor) -> None:
        """Write the unread tokens to texts [R, T]. Padding lies after a text's end, and nothing reads it."""
        text.scatter_(
            1, self.starts[:, None] + torch.arange(self.tokens.shape[1], device=text.device), self.tokens
        )

    def feed(self, x: Tensor, level: int) -> ForwardOutput:
        """Feed the drafts of a level, ids [R, n] or embeddings [R, n, hidden]."""
        if self.tree is None or self.sees is None:
            return self.forward(x, self.ends + level)
        tree = self.tree.level(level, len(x), self.sees)
        return self.forward(x, self.ends + self.tree.firsts[level], tree)

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
    def reads_states(self) -> bool:
        """Whether its forwards have to return hidden states."""
        ...

    @property
    def key(self) -> tuple[Any, ...]:
        """What its graphs depend on. Models with equal keys share graphs."""
        ...

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that its graphs have to keep alive."""
        ...

    def logits(self, unread: Unread) -> Generator[Tensor, Tensor, None]:
        """Yield the logits [R, n, V'] after the unread tokens, and after each level int64 [R, n] that is sent."""
        ...


def captured_width(unread: int) -> int:
    """Return the captured width that feeds `unread` tokens."""
    return next(width for width in WIDTHS if width >= unread)


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
    """

    def __init__(
        self,
        runner: GraphRunner,
        model: ChainModel,
        size: int,
        params: SamplingParams,
        role: Role,
        reports: bool,
        trees: StaticTrees | None = None,
    ) -> None:
        self.runner, self.model, self.size = runner, model, size
        self.params, self.role, self.reports = params, role, reports and params.greedy
        self.trees = trees
        self._sees: dict[FullTree, Tensor] = {}

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
        return room(starts) >= captured_width(unread) and room(ends) >= fed

    def _tree(self, levels: int) -> FullTree | None:
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
        places: list[list[int]] | None = None,
    ) -> Drafted | None:
        """Feed unread[r] after the first starts[r] tokens of row r and draft `levels` levels in each row.

        Args:
            levels: the drafts of a chain, or how deep a tree is.
            starts: how many tokens of each row have been fed.
            unread: the tokens to feed.
            prompts: the lengths of the prompts.
            keys: the round's noise keys.
            places: a number for each unread token, if the model needs one.

        Returns:
            The drafts, valid until the next call; None if this graph can't be captured.
        """
        runner, batch, counts = self.runner, len(starts), list(map(len, unread))
        width, ends = captured_width(max(counts)), [a + b for a, b in zip(starts, counts, strict=True)]
        padded = [tokens + [0] * (width - len(tokens)) for tokens in unread]
        numbers = [
            starts, *runner.cache_places(batch), counts, prompts, keys.host_ids, keys.host_positions,
            [keys.seed] * batch, *map(list, zip(*padded, strict=True)),
        ]  # fmt: skip
        if places is not None:
            numbers += map(list, zip(*([*row, *[0] * (width - len(row))] for row in places), strict=True))
        tree, sees = self._tree(levels), list[Tensor]()
        if tree is not None:
            if tree not in self._sees:
                self._sees[tree] = to_device(tree.sees, runner.device)
            sees.append(self._sees[tree])
        room, columns, fed = runner.cache.room, runner.cache.max_len, levels if tree is None else tree.fed
        filled = columns - min(room(starts) - width, room(ends) - fed)
        rows = runner.captured_rows(batch)
        prefixed = runner.cache.prefix is not None
        extent = captured_extent(runner.backend, filled, columns)
        drawn = not self.params.greedy and levels > 0
        probs = runner.draft_probs(rows, fed + (tree is not None), self.size) if drawn else None
        if drawn and probs is None:
            return None
        graph = _Graph(
            self.model, self.params, self.role, self.reports, self.size, levels, extent, prefixed, runner.vocab,
            tree,
        )  # fmt: skip
        output: tuple[Tensor, Tensor | None] | None = runner.call(
            ("chain", self.model.key, width, *graph[1:]),
            numbers,
            rows,
            graph.over(runner, width, probs, self.trees, *sees),
            keep=[*self.model.tensors, *sees],
            shared=("probs",) if drawn else (),
        )
        if output is None:
            return None
        tokens, chances = output
        probs, chances = (None if each is None else each[:batch] for each in (probs, chances))
        return Drafted(tokens[:batch], probs, chances, tree)

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the first round's graph, for rows that have nothing but one unread token."""
        zeros = [0] * rows
        places = [[0]] * rows if self.model.reads_states else None
        self.replay(levels, zeros, [[0]] * rows, zeros, RowKeys(0, zeros, zeros, self.runner.device), places)


class _Graph(NamedTuple):
    """What a captured chain depends on; `over` makes the function to capture."""

    model: ChainModel
    params: SamplingParams
    role: Role
    reports: bool
    size: int
    levels: int
    extent: int
    prefixed: bool
    vocab: int
    tree: FullTree | None

    def over(
        self,
        runner: GraphRunner,
        width: int,
        probs: Tensor | None,
        trees: StaticTrees | None,
        sees: Tensor | None = None,
    ) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
        """Return a function of the numbers [n, R] that feeds and drafts over the runner's cache.

        It returns the drafts and their chances, as in Drafted, and writes the distributions to `probs`.
        """
        # Keep only what outlives the runner.
        model, cache, backend = runner.model, runner.cache, runner.backend

        def chain(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            shared = (numbers[1], numbers[2]) if self.prefixed else None
            counts, prompts, *noise = numbers[3 if self.prefixed else 1 :][:5]
            lists = numbers[8 if self.prefixed else 6 :]
            fed = lists[:width].t().contiguous()
            places = lists[width:].t().contiguous() if len(lists) > width else None

            def forward(x: Tensor, lengths: Tensor, tree: TokenTree | None = None) -> ForwardOutput:
                batch = CapturedBatch(x, lengths, self.extent, self.model.reads_states, shared, tree=tree)
                output = model.forward_captured(batch, cache, backend)
                output.logits = output.logits[..., : self.vocab]
                return output

            starts, ends = numbers[0], numbers[0] + counts
            unread = Unread(fed, starts, counts, ends, prompts, places, forward, self.tree, sees)
            if self.tree is None or trees is None:
                return self._draw(unread, noise, probs)
            keys = NoiseKeys(noise[2][:1], noise[0], noise[1])
            levels = self.model.logits(unread)
            drafts, chances = grow(trees, self.tree, levels, self.model.vocabulary, keys, probs)
            return drafts, chances if self.params.greedy else None

        return chain

    def _draw(self, unread: Unread, noise: list[Tensor], probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ids, positions, seed = noise
        streams, vocabulary = stream(self.role, positions), self.model.vocabulary
        tokens, chances = list[Tensor](), list[Tensor]()
        if probs is not None and vocabulary is not None:
            probs.zero_()
        steps = self.model.logits(unread)
        logits = next(steps)[:, 0]
        for level in range(self.levels):
            if level:
                logits = steps.send(tokens[-1][:, None])[:, 0]
            if probs is None:
                column = argmax(logits)
                if self.reports:
                    chances.append(logits.float().softmax(-1).gather(1, column[:, None])[:, 0])
            else:
                q = probabilities(logits, self.params)
                column = draw(q, seed[:1], ids, positions + level, streams, vocabulary)
                spread(q, vocabulary, probs[:, level])
            tokens.append(column if vocabulary is None else vocabulary[column])
        drafts = torch.stack(tokens, 1) if tokens else unread.tokens[:, :0]
        return drafts, torch.stack(chances, 1) if chances else None
