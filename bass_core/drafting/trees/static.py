"""Trees of drafts of one fixed shape: so many children behind each draft, level by level.

Contract: `StaticTrees.propose` makes one Proposal. Every draft of a level gets as many children as the shape says,
fewer only where the text before them decides it: a row that may not draft so deep, a draft's cache without room
for a level, and a q without so many tokens, which is seen before any of them is drawn. Children of a greedy text
are the draft's likeliest tokens, of a coupled one those that the target's noise favours most, of a sampled one all
but one of the likeliest, and one that is drawn from q without them; it has noise of its own, keyed by its parent.
What is drawn is never left out again, and what is drawn behind it depends on it alone. So a text that is verified
by the tree rule (verification/tree.py) is distributed as the target's. Each level is read on the host: on an
accelerator a round waits once more for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...machine.transfer import to_device, to_host
from ...sampling.distribution import probabilities
from ...sampling.draw import draw
from ...sampling.noise import NoiseKeys, Role, exponentials, place_node
from ...sampling.params import SamplingParams
from ...sequence import Sequence
from ..base import Proposal
from .levels import Fed, LevelModel

# A child is drawn where at least this much of q is left beside its siblings.
LEAST_MASS = 1e-4
# What children are drafted behind: the row, and the draft's place in it, or -1 for the newest token.
Parent = tuple[int, int]


@dataclass
class _Row:
    """A row's drafts so far; lists as in Proposal. chances: what the draft gives each, for a reader."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    chances: list[float | None] = field(default_factory=list)


class StaticTrees:
    """Makes trees with shape[i] children behind each draft that is i deep.

    role: what the draft draws for; Role.TARGET under coupling. size: the target's V.
    """

    def __init__(self, shape: tuple[int, ...], params: SamplingParams, role: Role, size: int) -> None:
        self.shape, self.params, self.size = shape, params, size
        self.coupled = role is Role.TARGET and not params.greedy
        self.sampled = not (params.greedy or self.coupled)

    def propose(self, model: LevelModel, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
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

    def _proposal(self, made: list[_Row], probs: list[Tensor]) -> Proposal:
        counts = [len(row.tokens) for row in made]
        width = max(counts)
        padded = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in made], dtype=torch.long)
        proposal = Proposal(padded.view(len(made), width), counts, parents=[row.parents for row in made])
        if self.params.greedy:
            proposal.own = lambda: [row.chances for row in made]
        if probs:
            proposal.drawn, proposal.probs = [row.drawn for row in made], torch.stack(probs)
        return proposal


def _add(made: list[_Row], parent: Parent, token: int, chance: float | None, drawn: int = -1) -> Parent:
    """A draft behind `parent`; its own place. drawn: see Proposal."""
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
