"""Trees of drafts of one fixed shape: so many children after each draft, level by level.

Contract: `StaticTrees.propose` makes one TreeProposal. Every draft of a level gets as many children as the shape
says, fewer only where the text before them decides it: a row that may not draft so deep, a draft's cache without
room for a level, and on a CPU a q without so many tokens, which is seen before any of them is drawn. Children of a
greedy text are the draft's likeliest tokens, of a coupled one those that the target's noise favours most, of a
sampled one all but one of the likeliest, and one that is drawn from q without them; it has noise of its own, keyed
by its parent. What is drawn is never left out again, and what is drawn after it depends on it alone. So a text
that is verified by the tree rule (verify/tree.py) is distributed as the target's. On an accelerator nothing is
read on the host: a tree's shape is known without its tokens, and a child that q does not have is judged as any
other. Feeding a draft model: `root` brings its cache up to date with the text and says what may follow; `level`
feeds drafts whose parents were fed before, and says what may follow each. Nothing that is fed here counts in the
draft's cache: the next proposal feeds what was accepted again, as text.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.plan import MOST_TREE
from kernels.support import is_accelerator

from ..machine.transfer import to_device, to_host
from ..model.forward import BatchTree, ForwardBatch
from ..model.runner import ModelRunner
from ..sample.distribution import compiled, probabilities, spread, top
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, exponentials, place_node
from ..sample.params import SamplingParams
from ..sample.rows import copied, pick, stack, sums
from ..sequence import Sequence
from .base import TreeProposal

# A child is drawn where at least this much of q is left beside its siblings.
LEAST_MASS = 1e-4
# What children are drafted after: the row, and the draft's place in it, or -1 for the newest token.
Parent = tuple[int, int]


@dataclass
class _Row:
    """A row's drafts so far; lists as in TreeProposal."""

    parents: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class _Children(NamedTuple):
    """Of A drafts: their children tokens [A, C], what q gives each, and what those from `first` on stem from.

    On a CPU children without a chance are left out, which the text before them decides; LEAST_MASS is that of a
    single one that is drawn. drawn_from [A, V]: None if none was drawn.
    """

    tokens: Tensor
    chances: Tensor
    drawn_from: Tensor | None
    first: int


class _Grown:
    """The drafts of a round so far: their shape on the host, on the device their tokens and what q gives each."""

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self.rows = [_Row() for _ in range(rows)]
        self.tokens = torch.zeros(rows, most, dtype=torch.long, device=device)
        self.chances = torch.zeros(rows, most, device=device)
        self.probs: list[Tensor] = []

    def add(self, asked: list[Parent], children: _Children) -> list[Parent]:
        """Add children of the drafts that were asked; the places of those added."""
        tokens, chances, drawn_from, first = children
        width = tokens.shape[1]
        least = [LEAST_MASS if 0 < first == child else 0.0 for child in range(width)]
        found = [[1.0] * width] * len(asked) if is_accelerator(tokens.device) else chances.tolist()
        added, kept = list[Parent](), list[int]()
        for at, ((r, parent), given) in enumerate(zip(asked, found, strict=True)):
            row, place = self.rows[r], -1
            for child, (chance, bar) in enumerate(zip(given, least, strict=True)):
                if not chance > bar:
                    continue
                if child >= first and place < 0:
                    place = len(self.probs)
                    self.probs += [] if drawn_from is None else [drawn_from[at]]
                added.append((r, len(row.parents)))
                kept.append(at * width + child)
                row.parents.append(parent)
                row.drawn.append(place)
        if added:
            places, at_child = (
                to_device([list(place) for place in added], tokens.device),
                to_device(kept, tokens.device),
            )
            self.tokens[places[:, 0], places[:, 1]] = tokens.flatten()[at_child]
            self.chances[places[:, 0], places[:, 1]] = chances.float().flatten()[at_child]
        return added

    def feed(self, asked: list[Parent]) -> list[list[int]]:
        """What the model is fed: the parents of a row's drafts in their order, so each has its place there."""
        fed: list[list[int]] = [[] for _ in self.rows]
        for r, i in asked:
            fed[r].append(self.rows[r].parents[i])
        return fed

    def tokens_of(self, asked: list[Parent]) -> Tensor:
        """int64 [B, W]: the tokens of these drafts, padded."""
        places: list[list[int]] = [[] for _ in self.rows]
        for r, i in asked:
            places[r].append(i)
        width = max(map(len, places))
        return self.tokens.gather(
            1, to_device([(row + [0] * width)[:width] for row in places], self.tokens.device)
        )


class StaticTrees:
    """Makes trees with shape[i] children after each draft that is i deep.

    role: what the draft draws for; Role.TARGET under coupling. size: the target's V.
    """

    def __init__(self, shape: tuple[int, ...], params: SamplingParams, role: Role, size: int) -> None:
        self.shape, self.params, self.size = shape, params, size
        self.coupled = role is Role.TARGET and not params.greedy
        self.sampled = not (params.greedy or self.coupled)
        self.most = sum(itertools.accumulate(shape, operator.mul))

    def propose(
        self, model: LevelModel, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys
    ) -> TreeProposal:
        """Trees at most max_drafts[r] deep, and as deep as the model can be asked."""
        grown = _Grown(len(rows), self.most, keys.positions.device)
        asked: list[Parent] = [(r, -1) for r, most in enumerate(max_drafts) if most > 0]
        for depth, children in enumerate(self.shape):
            if depth:
                asked = [(r, i) for r, i in asked if max_drafts[r] > depth]
            fed = grown.feed(asked) if depth else []
            if not asked or (depth and max(map(len, fed)) > model.room):
                break
            if depth:
                logits = model.level(fed, grown.tokens_of(asked))
                logits = pick(logits, [r for r, _ in asked], [place for row in fed for place in range(len(row))])
            else:
                wanted = {r for r, _ in asked}
                logits = model.root(rows, [r in wanted for r in range(len(rows))])
                logits = pick(logits, [r for r, _ in asked])
            add = self._sampled if self.sampled else self._likely
            asked = grown.add(asked, add(asked, logits, model.vocabulary, children, depth, keys))
        return self._proposal(grown)

    def _likely(
        self, asked: list[Parent], logits: Tensor, ids: Tensor | None, children: int, depth: int, keys: NoiseKeys
    ) -> _Children:
        """The likeliest children; under coupling, those that the target's noise favours, with their q."""
        q = values = probabilities(logits, SamplingParams(1.0) if self.params.greedy else self.params)
        if self.coupled:
            at = to_device([r for r, _ in asked], q.device)
            named = q.shape[-1] if ids is None else ids
            streams = keys.stream(Role.TARGET)[at]
            values = q / exponentials(keys.seed, keys.sequence_ids[at], keys.positions[at] + depth, streams, named)
        columns = top(values, min(children, q.shape[-1]))[1]
        tokens = columns if ids is None else ids[columns]
        chances = q.gather(-1, columns)
        # Under coupling, where q decides nothing, all name theirs.
        if self.coupled:
            return _Children(tokens, chances, self._over_all(q, ids), 0)
        return _Children(tokens, chances, None, tokens.shape[1])

    def _sampled(
        self, asked: list[Parent], logits: Tensor, ids: Tensor | None, children: int, depth: int, keys: NoiseKeys
    ) -> _Children:
        """The likeliest children but one, and one drawn from what they leave of q, if that is anything."""
        q = probabilities(logits, self.params)
        likeliest, siblings = top(q, min(children - 1, q.shape[-1]))
        rest, left = _rest(q, siblings)
        at = to_device([r for r, _ in asked], q.device)
        nodes = to_device([i + 1 for _, i in asked], q.device)
        positions = place_node(keys.positions[at] + depth, nodes)
        column = draw(rest, keys.seed, keys.sequence_ids[at], positions, keys.stream(Role.DRAFT)[at], ids)
        columns = torch.cat((siblings, column[:, None]), dim=-1)
        tokens = columns if ids is None else ids[columns]
        chances = torch.cat((likeliest, left), dim=-1)
        return _Children(tokens, chances, self._over_all(rest, ids), tokens.shape[1] - 1)

    def _over_all(self, q: Tensor, ids: Tensor | None) -> Tensor:
        """q [N, V'] over the target's vocabulary: [N, V]."""
        return q if ids is None else spread(q, ids, self.size)

    def _proposal(self, grown: _Grown) -> TreeProposal:
        counts = [len(row.parents) for row in grown.rows]
        proposal = TreeProposal(
            grown.tokens[:, : max(counts)], counts, parents=[row.parents for row in grown.rows]
        )
        if self.params.greedy:
            proposal.own = lambda: [
                list(row[:count]) for row, count in zip(to_host(grown.chances).tolist(), counts, strict=True)
            ]
        if grown.probs:
            proposal.drawn, proposal.probs = [row.drawn for row in grown.rows], stack(grown.probs)
        return proposal


def _rest(q: Tensor, siblings: Tensor) -> tuple[Tensor, Tensor]:
    """What a child is drawn from, q [A, V] without its siblings' columns, and how much of q that is [A, 1].

    If nothing is left for a child, q itself is as exact: it is judged by what it was drawn from.
    """
    if not compiled(q):
        rest = q.scatter(-1, siblings, 0.0)
        left = sums(rest)
        return torch.where(left > LEAST_MASS, rest / left, q), left
    numbers = copied(q).numpy()
    np.put_along_axis(numbers, siblings.numpy(), 0.0, -1)
    left = sums(torch.from_numpy(numbers))
    np.divide(numbers, left.numpy(), out=numbers, where=left.numpy() > LEAST_MASS)
    few = ~(left[:, 0] > LEAST_MASS).numpy()  # NaN included
    numbers[few] = q.numpy()[few]
    return torch.from_numpy(numbers), left


# Of one row's drafts that are fed: which of those that were fed before each follows, or -1: the newest token.
Fed = list[int]


class LevelModel(Protocol):
    """A draft that trees can grow from (ModelDrafter, HeadDrafter)."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V']: the ids of its distribution's columns; None: all of the target's ids, in order."""
        ...

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Logits [B, V'] after each row's newest token; those of rows that are not wanted mean nothing."""
        ...

    def level(self, drafts: list[Fed], tokens: Tensor) -> Tensor:
        """Logits [B, W, V'] after tokens[r, i], which follows drafts[r][i]; those of padding mean nothing."""
        ...

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        ...


class TreeFeed:
    """The drafts of a round that a runner was fed, after rows that end at `ends`."""

    def __init__(self, runner: ModelRunner, ends: list[int]) -> None:
        self.runner, self.ends = runner, ends
        self._sees: list[list[int]] = [[] for _ in ends]
        self._depths: list[list[int]] = [[] for _ in ends]

    @property
    def fed(self) -> list[int]:
        """How many drafts of each row were fed."""
        return [len(row) for row in self._sees]

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        lengths = [end + fed for end, fed in zip(self.ends, self.fed, strict=True)]
        return min(self.runner.cache.room(lengths), MOST_TREE - max(self.fed))

    def batch(self, drafts: list[Fed], x: Tensor, return_states: bool = False) -> ForwardBatch:
        """The forward of one level; x: its tokens int64 [B, W] or their embeddings [B, W, hidden]."""
        width = max(map(len, drafts))
        before = self.fed
        sees, depths = [], []
        for r, row in enumerate(drafts):
            own_sees, own_depths = self._sees[r], self._depths[r]
            for i, parent in enumerate(row):
                own_sees.append((own_sees[parent] if parent >= 0 else 0) | 1 << (before[r] + i))
                own_depths.append(1 + own_depths[parent] if parent >= 0 else 0)
            padding = range(len(own_sees), before[r] + width)
            sees.append(own_sees[before[r] :] + [1 << column for column in padding])
            depths.append(own_depths[before[r] :] + [0 for _ in padding])
        lengths = [end + fed for end, fed in zip(self.ends, before, strict=True)]
        tree = BatchTree(sees, depths, before)
        return ForwardBatch(x, lengths, [max(len(row), 1) for row in drafts], None, return_states, tree=tree)


class LevelStates:
    """What a draft head knows of the drafts that it was fed, such as its states, for the drafts after them."""

    def __init__(self, root: Tensor) -> None:
        """root [B, hidden]: of the newest tokens."""
        self._levels = [root[:, None]]
        # By row: where the state of each fed draft lies.
        self._places: list[list[int]] = [[] for _ in root]

    def before(self, drafts: list[Fed]) -> Tensor:
        """The states [B, W, hidden] of the parents."""
        width, known = max(map(len, drafts)), torch.cat(self._levels, dim=1)
        places = [
            ([0 if parent < 0 else self._places[r][parent] for parent in row] + [0] * width)[:width]
            for r, row in enumerate(drafts)
        ]
        rows = torch.arange(len(drafts), device=known.device)[:, None]
        return known[rows, to_device(places, known.device)]

    def add(self, drafts: list[Fed], states: Tensor) -> None:
        """states [B, W, hidden]: of these drafts; copied, as the next forward may overwrite them."""
        first = sum(level.shape[1] for level in self._levels)
        for places, row in zip(self._places, drafts, strict=True):
            places.extend(range(first, first + len(row)))
        self._levels.append(states.clone())
