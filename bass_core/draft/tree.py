"""Trees of drafts of one fixed shape: so many children after each draft, level by level.

Contract: `StaticTrees.propose` makes one TreeProposal. Every draft of a level gets as many children as the shape
says, fewer only where the text before them decides it: a row that may not draft so deep, a draft's cache without
room for a level, and a q without so many tokens, which is seen before any of them is drawn. Children of a greedy
text are the draft's likeliest tokens, of a coupled one those that the target's noise favours most, of a sampled
one all but one of the likeliest, and one that is drawn from q without them; it has noise of its own, keyed by its
parent. What is drawn is never left out again, and what is drawn after it depends on it alone. So a text that is
verified by the tree rule (verify/tree.py) is distributed as the target's. Each level is read on the host: on an
accelerator a round waits once more for each. Feeding a draft model: `root` brings its cache up to date with the
text and says what may follow; `level` feeds drafts whose parents were fed before, and says what may follow each.
Nothing that is fed here counts in the draft's cache: the next proposal feeds what was accepted again, as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernels.plan import MOST_TREE

from ..machine.transfer import to_device, to_host
from ..model.draft_head import Ahead
from ..model.forward import BatchTree, ForwardBatch
from ..model.runner import ModelRunner
from ..sample.distribution import probabilities
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, exponentials, place_node
from ..sample.params import SamplingParams
from ..sequence import Sequence
from .base import TreeProposal

# A child is drawn where at least this much of q is left beside its siblings.
LEAST_MASS = 1e-4
# What children are drafted after: the row, and the draft's place in it, or -1 for the newest token.
Parent = tuple[int, int]


@dataclass
class _Row:
    """A row's drafts so far; lists as in TreeProposal. chances: what the draft gives each, for a reader."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    chances: list[float | None] = field(default_factory=list)


class StaticTrees:
    """Makes trees with shape[i] children after each draft that is i deep.

    role: what the draft draws for; Role.TARGET under coupling. size: the target's V.
    """

    def __init__(self, shape: tuple[int, ...], params: SamplingParams, role: Role, size: int) -> None:
        self.shape, self.params, self.size = shape, params, size
        self.coupled = role is Role.TARGET and not params.greedy
        self.sampled = not (params.greedy or self.coupled)

    def propose(
        self, model: LevelModel, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys
    ) -> TreeProposal:
        """Trees at most max_drafts[r] deep, and as deep as the model can be asked."""
        made, probs = [_Row() for _ in rows], list[Tensor]()
        asked: list[Parent] = [(r, -1) for r, most in enumerate(max_drafts) if most > 0]
        for depth, children in enumerate(self.shape):
            if depth:
                deep_enough = depth <= model.reach
                asked = [(r, i) for r, i in asked if deep_enough and max_drafts[r] > depth]
            fed = _feed(made, asked) if depth else []
            if not asked or (depth and max(map(len, fed)) > model.room):
                break
            if depth:
                places = [place for row in fed for place in range(len(row))]
                logits = model.level(fed)[[r for r, _ in asked], places]
            else:
                wanted = {r for r, _ in asked}
                logits = model.root(rows, [r in wanted for r in range(len(rows))])[[r for r, _ in asked]]
            ids = model.vocabulary
            add = self._add_sampled if self.sampled else self._add_likely
            asked = add(made, probs, asked, logits, ids, children, depth, keys)
        return self._proposal(made, probs)

    def _add_likely(
        self, made: list[_Row], probs: list[Tensor], asked: list[Parent], logits: Tensor, ids: Tensor | None,
        children: int, depth: int, keys: NoiseKeys,
    ) -> list[Parent]:  # fmt: skip
        """The likeliest children; under coupling, those that the target's noise favours, with their q."""
        q = values = probabilities(logits, SamplingParams(1.0) if self.params.greedy else self.params)
        if self.coupled:
            at = to_device([r for r, _ in asked], q.device)
            named = q.shape[-1] if ids is None else ids
            streams = keys.stream(Role.TARGET)[at]
            values = q / exponentials(keys.seed, keys.sequence_ids[at], keys.positions[at] + depth, streams, named)
        columns = values.topk(min(children, q.shape[-1]), dim=-1).indices
        tokens = columns if ids is None else ids[columns]
        found = to_host(torch.stack((tokens.double(), q.gather(-1, columns).double()), dim=-1)).tolist()
        added = []
        for parent, offered, row in zip(asked, found, self._over_all(q, ids), strict=True):
            place = len(probs) if self.coupled else -1
            probs += [row] if self.coupled else []
            added += [_add(made, parent, int(token), chance, place) for token, chance in offered if chance > 0]
        return added

    def _add_sampled(
        self, made: list[_Row], probs: list[Tensor], asked: list[Parent], logits: Tensor, ids: Tensor | None,
        children: int, depth: int, keys: NoiseKeys,
    ) -> list[Parent]:  # fmt: skip
        """The likeliest children but one, and one drawn from what they leave of q, if that is anything."""
        q = probabilities(logits, self.params)
        top = q.topk(min(children - 1, q.shape[-1]), dim=-1)
        rest = q.scatter(-1, top.indices, 0.0)
        left = rest.sum(-1, keepdim=True)
        # Where nothing is drawn, any weights will do for the draw that is thrown away.
        rest = torch.where(left > LEAST_MASS, rest / left, q)
        at = to_device([r for r, _ in asked], q.device)
        nodes = to_device([i + 1 for _, i in asked], q.device)
        positions = place_node(keys.positions[at] + depth, nodes)
        column = draw(rest, keys.seed, keys.sequence_ids[at], positions, keys.stream(Role.DRAFT)[at], ids)
        columns = torch.cat((top.indices, column[:, None]), dim=-1)
        tokens = columns if ids is None else ids[columns]
        chances = torch.cat((top.values, left), dim=-1)
        found = to_host(torch.stack((tokens.double(), chances.double()), dim=-1)).tolist()
        added = []
        for parent, offered, row in zip(asked, found, self._over_all(rest, ids), strict=True):
            *likely, (drawn, mass) = offered
            added += [_add(made, parent, int(token), chance) for token, chance in likely if chance > 0]
            if mass > LEAST_MASS:
                added.append(_add(made, parent, int(drawn), None, len(probs)))
                probs.append(row)
        return added

    def _over_all(self, q: Tensor, ids: Tensor | None) -> Tensor:
        """q [N, V'] over the target's vocabulary: [N, V]."""
        if ids is None:
            return q
        return torch.zeros(len(q), self.size, dtype=q.dtype, device=q.device).index_copy_(1, ids, q)

    def _proposal(self, made: list[_Row], probs: list[Tensor]) -> TreeProposal:
        counts = [len(row.tokens) for row in made]
        width = max(counts)
        padded = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in made], dtype=torch.long)
        proposal = TreeProposal(padded.view(len(made), width), counts, parents=[row.parents for row in made])
        if self.params.greedy:
            proposal.own = lambda: [row.chances for row in made]
        if probs:
            proposal.drawn, proposal.probs = [row.drawn for row in made], torch.stack(probs)
        return proposal


def _add(made: list[_Row], parent: Parent, token: int, chance: float | None, drawn: int = -1) -> Parent:
    """A draft after `parent`; its own place. drawn: see TreeProposal."""
    row = made[parent[0]]
    row.tokens.append(token)
    row.parents.append(parent[1])
    row.drawn.append(drawn)
    row.chances.append(chance)
    return parent[0], len(row.tokens) - 1


def _feed(made: list[_Row], asked: list[Parent]) -> list[list[Fed]]:
    """What the model is fed: a row's drafts in their order, so each has the place that it has in its row."""
    fed: list[list[Fed]] = [[] for _ in made]
    for r, i in asked:
        fed[r].append((made[r].tokens[i], made[r].parents[i]))
    return fed


# Of one row's drafts: the token, and which of the row's drafts that were fed it follows, or -1: the newest token.
Fed = tuple[int, int]


class LevelModel(Protocol):
    """A draft that trees can grow from (ModelDrafter, HeadDrafter)."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V']: the ids of its distribution's columns; None: all of the target's ids, in order."""
        ...

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Logits [B, V'] after each row's newest token; those of rows that are not wanted mean nothing."""
        ...

    def level(self, drafts: list[list[Fed]]) -> Tensor:
        """Logits [B, W, V'] after drafts[r][i] of each row; after the padding they mean nothing."""
        ...

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        ...

    @property
    def reach(self) -> int:
        """The depth of the deepest drafts after which it can be asked; a row's first drafts are 1 deep."""
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

    def batch(self, drafts: list[list[Fed]], x: Tensor, return_states: bool = False) -> ForwardBatch:
        """The forward of one level; x: its tokens int64 [B, W] or their embeddings [B, W, hidden]."""
        width = max(map(len, drafts))
        before = self.fed
        sees, depths = [], []
        for r, row in enumerate(drafts):
            own_sees, own_depths = self._sees[r], self._depths[r]
            for i, (_, parent) in enumerate(row):
                own_sees.append((own_sees[parent] if parent >= 0 else 0) | 1 << (before[r] + i))
                own_depths.append(1 + own_depths[parent] if parent >= 0 else 0)
            padding = range(len(own_sees), before[r] + width)
            sees.append(own_sees[before[r] :] + [1 << column for column in padding])
            depths.append(own_depths[before[r] :] + [0 for _ in padding])
        lengths = [end + fed for end, fed in zip(self.ends, before, strict=True)]
        tree = BatchTree(sees, depths, before)
        return ForwardBatch(x, lengths, [max(len(row), 1) for row in drafts], None, return_states, tree=tree)

    def tokens(self, drafts: list[list[Fed]]) -> Tensor:
        """int64 [B, W], padded."""
        width = max(map(len, drafts))
        padded = [([token for token, _ in row] + [0] * width)[:width] for row in drafts]
        return to_device(padded, self.runner.device)


class LevelStates:
    """A draft head's own states of the drafts that it was fed, for the drafts after them."""

    def __init__(self, root: Tensor) -> None:
        """root [B, hidden]: of the newest tokens."""
        self._levels = [root[:, None]]
        # By row: where the state of each fed draft lies.
        self._places: list[list[int]] = [[] for _ in root]

    def before(self, drafts: list[list[Fed]]) -> Tensor:
        """The states [B, W, hidden] of the parents."""
        width, known = max(map(len, drafts)), torch.cat(self._levels, dim=1)
        places = [
            ([0 if parent < 0 else self._places[r][parent] for _, parent in row] + [0] * width)[:width]
            for r, row in enumerate(drafts)
        ]
        rows = torch.arange(len(drafts), device=known.device)[:, None]
        return known[rows, to_device(places, known.device)]

    def add(self, drafts: list[list[Fed]], states: Tensor) -> None:
        """states [B, W, hidden]: of these drafts; copied, as the next forward may overwrite them."""
        first = sum(level.shape[1] for level in self._levels)
        for places, row in zip(self._places, drafts, strict=True):
            places.extend(range(first, first + len(row)))
        self._levels.append(states.clone())


class LinkedLevels:
    """What a head of several positions says after drafts that it is not fed: its link knows their tokens."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self._depths: list[list[int]] = [[] for _ in ahead.base]

    def behind(self, drafts: list[list[Fed]], tokens: Tensor) -> Tensor:
        """Logits [B, W, V'] after these drafts, at most `count` - 1 deep; tokens [B, W]: theirs, padded."""
        width, device = tokens.shape[1], tokens.device
        places = []
        for own, row in zip(self._depths, drafts, strict=True):
            first = len(own)
            for _, parent in row:
                own.append(1 + (own[parent] if parent >= 0 else 0))
            places.append((own[first:] + [1] * width)[:width])
        return self.ahead.after(to_device(places, device), tokens)
