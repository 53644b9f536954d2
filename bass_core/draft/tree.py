"""Trees of drafts with a fixed shape: `TreePlanner.propose` makes one TreeProposal per round.

For example, shape (3, 2) drafts three candidates for the next token, and two after each of those.

Greedy children are the likeliest tokens, and coupled children are the tokens that the target's noise favours. If
tokens are sampled, all children but the last are the likeliest tokens. The last one is drawn from the rest of q,
with noise keyed by its parent.

The output keeps the target's distribution under the tree rule (verify/tree.py), for two reasons:
- A draft may get fewer children because of the row's maximum depth, a full cache or, on a CPU, tokens without
  probability. All of these depend only on the text before the children.
- A child that was drawn is never left out, and later draws depend on it only because it is part of their text.

On an accelerator the host reads nothing: the shape is known in advance, and a child with q = 0 is verified like
any other. Drafts fed here don't stay in the draft's cache: the next proposal feeds the accepted drafts again.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..machine.transfer import to_device
from ..sample.distribution import compiled, probabilities, scatter_columns, top
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, exponentials, place_node
from ..sample.params import SamplingParams
from ..sample.rows import copied, pick, stack, sums
from ..sequence import Sequence
from .base import TreeProposal, listed
from .chain import Level, Levels

# A child is drawn from the rest of q only if its siblings leave more than this much of q's sum.
LEAST_MASS = 1e-4
# The parent of new drafts: its row, and its index among the row's drafts, or -1 for the newest token of the text.
Parent = tuple[int, int]


@dataclass
class _RowTree:
    """A row's drafts so far, as in TreeProposal."""

    parents: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class Children(NamedTuple):
    """Candidates for the children of A drafts.

    On a CPU, `_RoundTrees.add` leaves out children with chance 0. It also leaves out a single drawn child with
    siblings if its chance is at most LEAST_MASS. Both rules depend only on the text before the children.

    Attributes:
        tokens: [A, C], the children.
        chances: [A, C], the probability q of each child. For a drawn child with siblings, it is instead the sum of
            q over all tokens but the siblings.
        drawn_from: [A, V'], the distribution that the drawn children were drawn from, or None if none was drawn.
        first: index of the first drawn child; C if none was drawn.
    """

    tokens: Tensor
    chances: Tensor
    drawn_from: Tensor | None
    first: int


class _RoundTrees:
    """The drafts of a round so far: their shape on the host, their tokens and q on the device."""

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self.rows = [_RowTree() for _ in range(rows)]
        self.tokens = torch.zeros(rows, most, dtype=torch.long, device=device)
        self.chances = torch.zeros(rows, most, device=device)
        self.probs: list[Tensor] = []

    def add(self, parents: list[Parent], children: Children) -> list[Parent]:
        """Add the children of these parents. Return the row and the index of each new draft."""
        tokens, chances, drawn_from, first = children
        width = tokens.shape[1]
        min_chances = [LEAST_MASS if 0 < first == child else 0.0 for child in range(width)]
        known = [[1.0] * width] * len(parents) if is_accelerator(tokens.device) else chances.tolist()
        added, flat_indices = list[Parent](), list[int]()
        for at, ((r, parent), child_chances) in enumerate(zip(parents, known, strict=True)):
            row, place = self.rows[r], -1
            for child, (chance, min_chance) in enumerate(zip(child_chances, min_chances, strict=True)):
                if not chance > min_chance:
                    continue
                if child >= first and place < 0:
                    place = len(self.probs)
                    self.probs += [] if drawn_from is None else [drawn_from[at]]
                added.append((r, len(row.parents)))
                flat_indices.append(at * width + child)
                row.parents.append(parent)
                row.drawn.append(place)
        if added:
            places, at_child = (
                to_device([list(place) for place in added], tokens.device),
                to_device(flat_indices, tokens.device),
            )
            self.tokens[places[:, 0], places[:, 1]] = tokens.flatten()[at_child]
            self.chances[places[:, 0], places[:, 1]] = chances.float().flatten()[at_child]
        return added

    def feed(self, drafts: list[Parent]) -> list[list[int]]:
        """Return the parents of these drafts, as one list per row."""
        fed: list[list[int]] = [[] for _ in self.rows]
        for r, i in drafts:
            fed[r].append(self.rows[r].parents[i])
        return fed

    def tokens_of(self, drafts: list[Parent]) -> Tensor:
        """Return the tokens of these drafts, row by row with padding: int64 [B, W]."""
        places: list[list[int]] = [[] for _ in self.rows]
        for r, i in drafts:
            places[r].append(i)
        width = max(map(len, places))
        return self.tokens.gather(
            1, to_device([(row + [0] * width)[:width] for row in places], self.tokens.device)
        )


class TreePlanner:
    """Drafts trees with shape[i] children after each draft at depth i.

    Args:
        shape: children per draft, level by level.
        role: the noise that the draft uses: Role.TARGET under coupling.
        size: V, the size of the target's vocabulary.
    """

    def __init__(self, shape: tuple[int, ...], params: SamplingParams, role: Role, size: int) -> None:
        self.shape, self.params, self.size = shape, params, size
        self.coupled = role is Role.TARGET and not params.greedy
        self.sampled = not (params.greedy or self.coupled)
        self.most = sum(itertools.accumulate(shape, operator.mul))

    def propose(
        self, model: LevelModel, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys
    ) -> TreeProposal:
        """Propose trees at most max_drafts[r] deep, or less deep if the model's cache gets full."""
        trees, levels = _RoundTrees(len(rows), self.most, keys.positions.device), model.levels(rows, max_drafts)
        frontier: list[Parent] = [(r, -1) for r, most in enumerate(max_drafts) if most > 0]
        # The first drafts of the frontier and of the level before it.
        firsts, before = [-1] * len(rows), list[int]()
        for depth, children in enumerate(self.shape):
            frontier = [(r, i) for r, i in frontier if max_drafts[r] > depth]
            if not frontier:
                break
            level = Level(trees.tokens_of(frontier), trees.feed(frontier), before) if depth else None
            logits = _logits_after(levels, level)
            if logits is None:
                break
            columns = [i - firsts[r] for r, i in frontier]
            logits = pick(logits, [r for r, _ in frontier], columns)
            after = None
            if not self.params.greedy:
                after = to_device([[r for r, _ in frontier], [i + 1 for _, i in frontier]], logits.device)
            before, firsts = firsts, [len(row.parents) for row in trees.rows]
            frontier = trees.add(frontier, self.children(after, logits, model.vocabulary, children, keys, depth))
        return self._proposal(trees, model.vocabulary)

    def children(
        self, after: Tensor | None, logits: Tensor, ids: Tensor | None, children: int, keys: NoiseKeys, depth: int
    ) -> Children:
        """Choose and draw the children of A drafts.

        Args:
            after: int64 [2, A], the row of each draft and the number of its node in the row's tree
                (`place_node`). None if decoding is greedy.
            logits: [A, V'].
            ids: the token id of each column, as LevelModel.vocabulary.
            children: how many each draft gets.
            keys: the round's noise keys.
            depth: the children's depth, from 0.
        """
        choose = self._sampled if self.sampled else self._likely
        return choose(after, logits, ids, children, keys, depth)

    def _likely(
        self, after: Tensor | None, logits: Tensor, ids: Tensor | None, children: int, keys: NoiseKeys, depth: int
    ) -> Children:
        """Return the likeliest children or, under coupling, those that the target's noise favours."""
        q = values = probabilities(logits, SamplingParams(1.0) if self.params.greedy else self.params)
        if self.coupled:
            assert after is not None
            at = after[0]
            named = q.shape[-1] if ids is None else ids
            streams = keys.stream(Role.TARGET)[at]
            values = q / exponentials(keys.seed, keys.sequence_ids[at], keys.positions[at] + depth, streams, named)
        columns = top(values, min(children, q.shape[-1]))[1]
        tokens = columns if ids is None else ids[columns]
        chances = q.gather(-1, columns)
        # Coupled verification ignores q, so all children may be marked as drawn from q.
        if self.coupled:
            return Children(tokens, chances, q, 0)
        return Children(tokens, chances, None, tokens.shape[1])

    def _sampled(
        self, after: Tensor | None, logits: Tensor, ids: Tensor | None, children: int, keys: NoiseKeys, depth: int
    ) -> Children:
        """Return the likeliest children and, as the last child, one drawn from the rest of q."""
        q = probabilities(logits, self.params)
        likeliest, siblings = top(q, min(children - 1, q.shape[-1]))
        rest, left = _without_siblings(q, siblings)
        assert after is not None
        at, nodes = after
        positions = place_node(keys.positions[at] + depth, nodes)
        column = draw(rest, keys.seed, keys.sequence_ids[at], positions, keys.stream(Role.DRAFT)[at], ids)
        columns = torch.cat((siblings, column[:, None]), dim=-1)
        tokens = columns if ids is None else ids[columns]
        chances = torch.cat((likeliest, left), dim=-1)
        return Children(tokens, chances, rest, tokens.shape[1] - 1)

    def _proposal(self, trees: _RoundTrees, ids: Tensor | None) -> TreeProposal:
        counts = [len(row.parents) for row in trees.rows]
        proposal = TreeProposal(
            trees.tokens[:, : max(counts)], counts, parents=[row.parents for row in trees.rows]
        )
        if self.params.greedy:
            proposal.greedy_probs = partial(listed, trees.chances, counts)
        if trees.probs:
            q = stack(trees.probs)
            proposal.drawn = [row.drawn for row in trees.rows]
            proposal.probs = q if ids is None else scatter_columns(q, ids, self.size)
        return proposal


def _logits_after(levels: Levels, level: Level | None) -> Tensor | None:
    """Return the logits after a level, or the first ones after None; None if the level doesn't fit."""
    try:
        return next(levels) if level is None else levels.send(level)
    except StopIteration:
        return None


def _without_siblings(q: Tensor, siblings: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [A, V] without the columns `siblings`, normalised, and its sum [A, 1] before that."""
    # If the sum is at most LEAST_MASS, the result is q itself. The output stays exact, because the child is
    # verified with the distribution that it was drawn from.
    if not compiled(q):
        rest = q.scatter(-1, siblings, 0.0)
        left = sums(rest)
        return torch.where(left > LEAST_MASS, rest / left, q), left
    values = copied(q).numpy()
    np.put_along_axis(values, siblings.numpy(), 0.0, -1)
    left = sums(torch.from_numpy(values))
    np.divide(values, left.numpy(), out=values, where=left.numpy() > LEAST_MASS)
    empty = ~(left[:, 0] > LEAST_MASS).numpy()  # also NaN
    values[empty] = q.numpy()[empty]
    return torch.from_numpy(values), left


class LevelModel(Protocol):
    """A drafter that `TreePlanner` can make trees with (ModelDrafter, HeadDrafter)."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V'], the token id of each column of its logits. None: all of the target's ids, in order."""
        ...

    def levels(self, rows: list[Sequence], max_drafts: list[int]) -> Levels:
        """Read the text of the rows that draft, and yield logits, first those after the newest tokens."""
        ...
