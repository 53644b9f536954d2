"""How drafts are fed, one level after another (`DraftFeed`), and how a chain is drawn from them (`ChainSampler`).

A draft's forwards are a generator (`Levels`), so one loop draws chains inside and outside of captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.plan import MAX_TREE_TOKENS

from ..machine.transfer import to_device
from ..model.forward import ForwardBatch, ForwardOutput, HostTreeMask
from ..model.runner import ModelRunner
from ..sample.distribution import argmax, compiled, largest, probabilities, scatter_columns
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role
from ..sample.params import SamplingParams
from ..sample.rows import stack
from .base import Proposal, listed, no_drafts

# A row continues drafting only while the probability of its drafts is at least this many times `confidence`,
# because a forward of the head costs more than one more token in a verification. No row depends on other rows
# here.
HEADROOM = 4.0


class Level(NamedTuple):
    """The drafts of a level, which are fed together.

    Attributes:
        tokens: int64 [B, W].
        parents: for each row, the index of each draft's parent among the row's drafts, or -1 for the newest token
            of the text. The row's other tokens are padding. None if equally many drafts of this level follow each
            one of the level before, as in chains.
        firsts: for each row, the index of the first draft of the level before; -1 if that is the newest token.
    """

    tokens: Tensor
    parents: list[list[int]] | None = None
    firsts: Sequence[int] = ()

    def inherit(self, values: Tensor) -> Tensor:
        """Return the parent's value for each draft, [B, W, n], of the values [B, W', n] of the level before."""
        width = self.tokens.shape[1]
        if self.parents is None:
            children = width // values.shape[1]
            return values[:, :, None].expand(-1, -1, children, -1).flatten(1, 2)
        pairs = zip(self.parents, self.firsts, strict=True)
        columns = [([parent - first for parent in row] + [0] * width)[:width] for row, first in pairs]
        rows = torch.arange(len(columns), device=values.device)[:, None]
        return values[rows, to_device(columns, values.device)]


# Yields the logits [B, 1, V'] after the newest tokens, and [B, W, V'] after each level that is sent. Ends if the
# cache has no room for a level.
Levels = Generator[Tensor, Level, None]
# Feeds a level's ids or embeddings [B, W, ...]; the last argument is the number of levels before it.
Feed = Callable[[Tensor, Level, int], ForwardOutput | None]


class _Running(Protocol):
    runner: ModelRunner
    calls: int


class DraftFeed:
    """Feeds the levels of a round to a drafter's runner, and counts the forwards in its `calls`.

    Args:
        drafter: the drafter.
        ends: where the text of each row ends.
        return_states: as in ForwardBatch.
    """

    def __init__(self, drafter: _Running, ends: list[int], return_states: bool = False) -> None:
        self.drafter, self.ends, self.return_states = drafter, ends, return_states
        self._sees: list[list[int]] = [[] for _ in ends]
        self._depths: list[list[int]] = [[] for _ in ends]

    def feed(self, x: Tensor, level: Level, depth: int) -> ForwardOutput | None:
        """Feed a level (`Feed`)."""
        if level.parents is None:
            batch = ForwardBatch(x, [end + depth for end in self.ends], return_states=self.return_states)
        else:
            before = list(map(len, self._sees))
            lengths = [end + count for end, count in zip(self.ends, before, strict=True)]
            room = min(self.drafter.runner.cache.room(lengths), MAX_TREE_TOKENS - max(before))
            if x.shape[1] > room:
                return None
            real = [max(len(row), 1) for row in level.parents]
            tree = self._tree(level.parents, before, x.shape[1])
            batch = ForwardBatch(x, lengths, real, return_states=self.return_states, tree=tree)
        self.drafter.calls += 1
        return self.drafter.runner.forward(batch)

    def _tree(self, parents: list[list[int]], before: list[int], width: int) -> HostTreeMask:
        sees, depths = [], []
        for r, row in enumerate(parents):
            row_sees, row_depths = self._sees[r], self._depths[r]
            for i, parent in enumerate(row):
                row_sees.append((row_sees[parent] if parent >= 0 else 0) | 1 << (before[r] + i))
                row_depths.append(1 + row_depths[parent] if parent >= 0 else 0)
            padding = range(len(row_sees), before[r] + width)
            sees.append(row_sees[before[r] :] + [1 << column for column in padding])
            depths.append(row_depths[before[r] :] + [0 for _ in padding])
        return HostTreeMask(sees, depths, before)


@dataclass
class DraftStep:
    """The drafts at one position of all chains.

    Attributes:
        tokens: int64 [B].
        columns: int64 [B], their columns of the logits.
        q: float32 [B, V'], the distributions that they were drawn from; None if decoding is greedy.
        logits: [B, V']; the next forward may overwrite them.
    """

    tokens: Tensor
    columns: Tensor
    q: Tensor | None
    logits: Tensor

    @cached_property
    def probs(self) -> Tensor:
        """q; if decoding is greedy, the distribution at temperature 1."""
        return probabilities(self.logits, SamplingParams(temperature=1.0)) if self.q is None else self.q

    @property
    def chances(self) -> Tensor:
        """The probability of each draft in `probs`, [B, 1]."""
        return self.probs.gather(1, self.columns[:, None])


@dataclass(frozen=True)
class ChainSampler:
    """Draws chains.

    Attributes:
        params: how drafts are sampled.
        role: the noise that they are drawn with.
        size: V, the size of the target's vocabulary.
        vocabulary: int64 [V'], the token id of each column of the logits. None: all of the target's ids, in order.
    """

    params: SamplingParams
    role: Role
    size: int
    vocabulary: Tensor | None = None

    def steps(
        self, levels: Levels, newest: Tensor, count: int, keys: NoiseKeys, out: Tensor | None = None
    ) -> Iterator[DraftStep]:
        """Draw `count` drafts per row; nothing is read on the host.

        Args:
            levels: the draft's forwards.
            newest: [B, 1, V'], the first logits of `levels`.
            count: how many.
            keys: the round's noise keys.
            out: a buffer [count, B, V'] for q; see `probabilities`.
        """
        logits, streams = newest[:, 0], None if self.params.greedy else keys.stream(self.role)
        for step in range(count):
            if streams is None:
                q, columns = None, argmax(logits)
            else:
                q = probabilities(logits, self.params, None if out is None else out[step])
                positions = keys.positions + step
                columns = draw(q, keys.seed, keys.sequence_ids, positions, streams, self.vocabulary)
            tokens = columns if self.vocabulary is None else self.vocabulary[columns]
            yield DraftStep(tokens, columns, q, logits)
            if step + 1 < count:
                logits = levels.send(Level(tokens[:, None]))[:, 0]

    def propose(
        self,
        levels: Levels,
        max_drafts: list[int],
        keys: NoiseKeys,
        report: bool = False,
        confidence: float = 0.0,
    ) -> Proposal:
        """Propose chains of max_drafts[r] drafts, at least one in some row, or of fewer if they are unlikely.

        Args:
            levels: the draft's forwards.
            max_drafts: how many drafts each row may have.
            keys: the round's noise keys.
            report: whether greedy drafts report their probabilities (`Proposal.greedy_probs`).
            confidence: limits the drafts of a row (HeadDrafter).
        """
        newest, length, full = next(levels), max(max_drafts), None
        if not self.params.greedy and self.vocabulary is None and compiled(newest):
            # Each q goes directly into its place.
            full = torch.empty(length, len(newest), newest.shape[-1], dtype=torch.float32)
        steps = self.steps(levels, newest, length, keys, full)
        tokens, probs, chances = list[Tensor](), list[Tensor](), list[Tensor]()
        rows = _Confidence(confidence, max_drafts) if confidence else None
        for step in steps if rows is None else rows.kept(steps, newest.device):
            tokens.append(step.tokens)
            if step.q is not None:
                probs.append(step.q)
            elif report:
                chances.append(step.chances)
        counts = list(max_drafts) if rows is None else rows.counts
        if not tokens:
            return no_drafts(counts, newest.device)
        if probs and full is None:
            full = stack(probs)
        if full is not None and self.vocabulary is not None:
            full = scatter_columns(full, self.vocabulary, self.size)
        q = None if full is None else full.transpose(0, 1)
        proposal = Proposal(torch.stack(tokens, dim=1), counts, q)
        if chances:
            proposal.greedy_probs = partial(listed, torch.cat(chances, dim=1), counts)
        return proposal


class _Confidence:
    """Keeps the steps of a chain as long as some row is confident (HeadDrafter), and counts each row's drafts."""

    def __init__(self, confidence: float, max_drafts: list[int]) -> None:
        self.confidence, self.max_drafts, self.counts = confidence, max_drafts, list[int]()

    def kept(self, steps: Iterator[DraftStep], device: torch.device) -> Iterator[DraftStep]:
        """Return the first steps, which are those in which some row is confident."""
        most = to_device(self.max_drafts, device)
        active, counts, chance = most > 0, torch.zeros_like(most), torch.ones(len(most), device=device)
        for number, step in enumerate(steps, start=1):
            active = active & (chance * largest(step.probs)[1] >= self.confidence)
            if not active.any():
                break
            chance, counts = chance * step.chances[:, 0], counts + active
            yield step
            active = active & (most > number) & (chance >= HEADROOM * self.confidence)
            if not active.any():
                break
        self.counts = counts.tolist()
