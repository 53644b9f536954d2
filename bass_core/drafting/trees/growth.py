"""How the trees of a round's drafts grow: all rows together, level by level, best drafts first.

Contract: `Growth.grow` makes one Proposal. A `Grower` (budget/trees.py) decides how many drafts are verified and
how often the draft is asked. Greedy and coupled texts never depend on which drafts there are, so there any drafts
are taken, the likeliest first, and some are left out again when better ones are found. For sampled texts three
things keep the distribution: how many children a draft gets is decided by what was known before they were drawn;
all but one of them are the likeliest tokens or copies, and that one is drawn from q without them; and what was
drawn is never left out again. What was drawn may decide what is drafted behind it. Copies stand beside what a
model drafts.
Each level's candidates are read on the host: on an accelerator a round waits once more for each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from ...budget.trees import MOST_DRAFTS, Draft, Grower
from ...machine.transfer import to_device, to_host
from ...sampling.distribution import probabilities
from ...sampling.draw import draw
from ...sampling.noise import NoiseKeys, Role, exponentials, place_node
from ...sampling.params import SamplingParams
from ...sequence import Sequence
from ..base import Proposal
from .levels import Fed, LevelModel
from .nodes import Node

# The most children of one draft: of greedy and coupled texts, and of sampled ones.
WIDEST, WIDEST_SAMPLED = 6, 3
# A drawn child needs at least this much of q beside its siblings.
LEAST_MASS = 1e-4


# What a node is asked behind: the row, and its place in the row, or -1 for the newest token.
Open = tuple[int, int]


class Growth:
    """The trees of one round. size: the target's V where the model's vocabulary is a part of it."""

    def __init__(
        self,
        rows: list[Sequence],
        max_drafts: list[int],
        room: int,
        keys: NoiseKeys,
        grower: Grower,
        params: SamplingParams,
        role: Role,
        size: int | None = None,
    ) -> None:
        self.rows, self.keys, self.grower, self.params, self.size = rows, keys, grower, params, size
        self.deepest = [min(most, room, grower.limit) for most in max_drafts]
        self.most = min(room, MOST_DRAFTS)
        self.coupled = role == Role.TARGET
        self.sampled = not (params.greedy or self.coupled)
        self.nodes: list[list[Node]] = [[] for _ in rows]
        self.levels = 0
        self._fed = [0] * len(rows)
        self._drawn: list[Tensor] = []

    def grow(self, copied: list[Proposal], model: LevelModel | None) -> Proposal:
        """Grow from copies, proposals of chains of point masses, the better ones first, and from a model."""
        for proposal in copied:
            self._add_copies(proposal)
        self._choose()
        asked: list[Open] = [(r, -1) for r, deepest in enumerate(self.deepest) if deepest]
        while model is not None and asked and self._pays(asked):
            if self.levels:
                logits = model.level(self._feed(asked))
                places = [(r, self.nodes[r][i].fed - self._before[r]) for r, i in asked]
                logits = logits[[r for r, _ in places], [place for _, place in places]]
            else:
                wanted = {r for r, _ in asked}
                logits = model.root(self.rows, [r in wanted for r in range(len(self.rows))])
                logits = logits[[r for r, _ in asked]]
            self.levels += 1
            (self._add_sampled if self.sampled else self._add_likely)(asked, logits, model.vocabulary)
            self._choose()
            asked = self._unasked(model.room, model.reach)
        return self._proposal()

    def _pays(self, asked: list[Open]) -> bool:
        """Whether the grower wants another level."""
        worths = [node.worth for row in self.nodes for node in row if node.chosen]
        open_ = [self._open(r, i) for r, i in asked]
        return self.grower.deeper(worths, open_, len(self.rows), self.levels)

    def _open(self, row: int, parent: int) -> float:
        """The chance that a draft is accepted and none of those that follow it."""
        worth = 1.0 if parent < 0 else self.nodes[row][parent].worth
        followed = sum(node.worth for node in self.nodes[row] if node.parent == parent and node.chosen)
        return max(worth - followed, 0.0)

    def _add(self, row: int, token: int, parent: int, kind: str, raw: float, chance: float, share: float) -> Node:
        """A draft behind `parent`; share: what copies beside it leave of its chance."""
        depth, worth = 1, 1.0
        if parent >= 0:
            before = self.nodes[row][parent]
            depth, worth = before.depth + 1, before.worth
        node = Node(row, token, parent, depth, kind, raw, worth * chance * share)
        self.nodes[row].append(node)
        return node

    def _add_copies(self, copied: Proposal) -> None:
        for r, (tokens, count) in enumerate(zip(copied.tokens.tolist(), copied.num_drafted, strict=True)):
            parent = -1
            for depth, token in enumerate(tokens[: min(count, self.deepest[r])], start=1):
                beside = self._beside(r, parent)
                if token not in beside:
                    chance = self.grower.chance("copied", depth, 1.0)
                    self._add(r, token, parent, "copied", 1.0, chance, (1 - chance) ** len(beside))
                parent = next(i for i, n in enumerate(self.nodes[r]) if n.parent == parent and n.token == token)

    def _beside(self, row: int, parent: int) -> dict[int, Node]:
        """The children, by token, that a draft has already: copies."""
        return {node.token: node for node in self.nodes[row] if node.parent == parent}

    def _add_likely(self, asked: list[Open], logits: Tensor, vocabulary: Tensor | None) -> None:
        """The likeliest children of each draft; under coupling, those that the target's noise favours."""
        q = probabilities(logits, SamplingParams(1.0) if self.params.greedy else self.params)
        values = q
        if self.coupled:
            ids, positions = self._keys_of(asked)
            noise = exponentials(
                self.keys.seed,
                ids,
                positions,
                self.keys.stream(Role.TARGET)[to_device([r for r, _ in asked], q.device)],
                q.shape[-1] if vocabulary is None else vocabulary,
            )
            values = q / noise
        top = values.topk(min(WIDEST, values.shape[-1]), dim=-1)
        chances = top.values / top.values.sum(-1, keepdim=True) if self.coupled else top.values
        tokens = top.indices if vocabulary is None else vocabulary[top.indices]
        found = to_host(torch.stack((tokens.double(), chances.double()), dim=-1)).tolist()
        worths: list[list[float]] = [[] for _ in asked]
        for (r, parent), children, offered in zip(asked, found, worths, strict=True):
            beside = self._beside(r, parent)
            taken = {int(token) for token, _ in children} & set(beside)
            claimed = sum(self.grower.chance("copied", node.depth, 1.0) for node in beside.values())
            left = 1 - sum(raw for token, raw in children if int(token) in taken)
            share = min(1.0, max(0.0, 1 - claimed) / max(left, 1e-6)) if beside else 1.0
            depth = 1 if parent < 0 else self.nodes[r][parent].depth + 1
            for token, raw in children:
                if raw > 0 and int(token) not in beside:
                    chance = self.grower.chance("likely", depth, raw)
                    offered.append(self._add(r, int(token), parent, "likely", raw, chance, share).worth)
        self.grower.offered(worths)

    def _add_sampled(self, asked: list[Open], logits: Tensor, vocabulary: Tensor | None) -> None:
        """Children whose number is decided before one of them is drawn."""
        q = probabilities(logits, self.params)
        top = q.topk(min(WIDEST_SAMPLED + 1, q.shape[-1]), dim=-1)
        tokens = top.indices if vocabulary is None else vocabulary[top.indices]
        likely = to_host(torch.stack((tokens.double(), top.values.double()), dim=-1)).tolist()
        drawing: list[tuple[int, list[int], float]] = []
        for place, children in self._sampled_counts(asked, likely):
            (r, parent), beside = asked[place], self._beside(*asked[place])
            depth, first, kept = 1 if parent < 0 else self.nodes[r][parent].depth + 1, likely[place][0][1], 0.0
            deterministic = [int(token) for token, raw in likely[place] if raw > 0 and int(token) not in beside]
            raws = {int(token): raw for token, raw in likely[place]}
            for token in deterministic[: children - 1]:
                chance = self.grower.chance("likely", depth, raws[token])
                self._add(r, token, parent, "likely", raws[token], chance, 1.0).chosen = True
                kept += chance
            left = 1 - sum(raws.get(token, 0.0) for token in [*beside, *deterministic[: children - 1]])
            if left > LEAST_MASS:
                chance = max(self.grower.any_chance(children, first) - kept, 0.05)
                drawing.append((place, [*beside, *deterministic[: children - 1]], chance))
                self._add(r, -1, parent, "drawn", first, chance, 1.0).chosen = True
        if drawing:
            self._draw(asked, q, drawing, vocabulary)

    def _sampled_counts(self, asked: list[Open], likely: list[list[list[float]]]) -> list[tuple[int, int]]:
        """(place in asked, number of children) of the drafts that get any: what the next child adds decides."""
        offers: list[list[tuple[float, int, int]]] = [[] for _ in self.rows]
        worths: list[list[float]] = [[] for _ in asked]
        for place, (r, parent) in enumerate(asked):
            open_, before, gain = self._open(r, parent), 0.0, 1.0
            for children in range(1, WIDEST_SAMPLED + 1):
                chance = self.grower.any_chance(children, likely[place][0][1])
                # A further child never adds more than the one before it.
                gain = min(gain, max(chance - before, 0.0))
                before = chance
                worths[place].append(open_ * gain)
                offers[r].append((open_ * gain, -children, place))
        self.grower.offered(worths)
        best = [
            sorted(row, reverse=True)[: self.most - len(nodes)]
            for row, nodes in zip(offers, self.nodes, strict=True)
        ]
        kept = [sorted((node.worth for node in row if node.chosen), reverse=True) for row in self.nodes]
        takes = self.grower.counts(kept, [[worth for worth, _, _ in row] for row in best], self.levels)
        taken = [place for row, take in zip(best, takes, strict=True) for _, _, place in row[:take]]
        return sorted(Counter(taken).items())

    def _draw(
        self, asked: list[Open], q: Tensor, drawing: list[tuple[int, list[int], float]], vocabulary: Tensor | None
    ) -> None:
        """Draw one child of each of these drafts, from q without its siblings."""
        device = q.device
        places = to_device([place for place, _, _ in drawing], device)
        most = max(1, max(len(siblings) for _, siblings, _ in drawing))
        padded = to_device([(siblings + [-1] * most)[:most] for _, siblings, _ in drawing], device)
        columns = torch.arange(q.shape[-1], device=device) if vocabulary is None else vocabulary
        rest = q[places].masked_fill((padded[:, :, None] == columns).any(1), 0.0)
        rest = rest / rest.sum(-1, keepdim=True)
        ids, positions = self._keys_of(asked)
        nodes = to_device([asked[place][1] + 1 for place, _, _ in drawing], device)
        streams = self.keys.stream(Role.DRAFT)[to_device([asked[place][0] for place, _, _ in drawing], device)]
        at = place_node(positions[places], nodes)
        column = draw(rest, self.keys.seed, ids[places], at, streams, vocabulary)
        if vocabulary is not None:
            whole = torch.zeros(len(rest), self.size or int(vocabulary.max()) + 1, device=device)
            rest, column = whole.index_copy_(1, vocabulary, rest), vocabulary[column]
        for (place, _, _), token, row in zip(drawing, to_host(column).tolist(), rest, strict=True):
            r, parent = asked[place]
            node = next(n for n in self.nodes[r] if n.parent == parent and n.kind == "drawn")
            node.token, node.q = int(token), len(self._drawn)
            self._drawn.append(row)

    def _keys_of(self, asked: list[Open]) -> tuple[Tensor, Tensor]:
        """Ids and positions int64 [N] of what follows these drafts."""
        device = self.keys.positions.device
        rows = to_device([r for r, _ in asked], device)
        depths = to_device([0 if i < 0 else self.nodes[r][i].depth for r, i in asked], device)
        return self.keys.sequence_ids[rows], self.keys.positions[rows] + depths

    def _choose(self) -> None:
        """Choose the drafts to verify, the best ones; a sampled tree keeps what was chosen before."""
        ranked = [sorted(row, key=lambda node: (-node.worth, node.depth)) for row in self.nodes]
        for node in [] if self.sampled else (node for row in ranked for node in row):
            node.chosen = False
        fixed = [[node for node in row if node.chosen] for row in ranked]
        others = [[node for node in row if not node.chosen] for row in ranked]
        others = [row[: self.most - len(kept)] for row, kept in zip(others, fixed, strict=True)]
        takes = self.grower.counts(_worths(fixed), _worths(others), self.levels)
        for row, take in zip(others, takes, strict=True):
            for node in row[:take]:
                node.chosen = node.parent < 0 or self.nodes[node.row][node.parent].chosen

    def _unasked(self, room: int, reach: int) -> list[Open]:
        """Chosen drafts behind which the model may be asked next: their parents were fed."""
        found: list[Open] = []
        for r, row in enumerate(self.nodes):
            own, deepest = 0, min(self.deepest[r] - 1, reach)
            for i, node in enumerate(row):
                ready = node.parent < 0 or row[node.parent].fed >= 0
                if node.chosen and node.fed < 0 and ready and node.depth <= deepest and own < room:
                    found.append((r, i))
                    own += 1
        return found

    def _feed(self, asked: list[Open]) -> list[list[Fed]]:
        """What the model is fed for them."""
        self._before = list(self._fed)
        fed: list[list[Fed]] = [[] for _ in self.rows]
        for r, i in asked:
            node = self.nodes[r][i]
            parent = -1 if node.parent < 0 else self.nodes[r][node.parent].fed
            fed[r].append((node.token, parent))
            node.fed = self._fed[r]
            self._fed[r] += 1
        return fed

    @property
    def modelled(self) -> int:
        """How many of the proposed drafts the model drafted."""
        return sum(node.chosen and node.kind != "copied" for row in self.nodes for node in row)

    def _proposal(self) -> Proposal:
        """The chosen drafts, parents first."""
        tokens, parents, drawn, told = [], [], [], []
        for row in self.nodes:
            kept = [i for i, node in enumerate(row) if node.chosen]
            places = {-1: -1} | {i: place for place, i in enumerate(kept)}
            tokens.append([row[i].token for i in kept])
            parents.append([places[row[i].parent] for i in kept])
            drawn.append([row[i].q for i in kept])
            told.append([replace(row[i], parent=places[row[i].parent]) for i in kept])
        self.grower.grown([list[Draft](row) for row in told], self.levels)
        counts = [len(row) for row in tokens]
        width = max(counts)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens], dtype=torch.long)
        kinds = ["".join(node.kind[0] for node in row) for row in told]
        proposal = Proposal(padded.view(len(counts), width), counts, parents=parents, kinds=kinds)
        if self.params.greedy:
            proposal.own = lambda: [[None if node.kind == "copied" else node.raw for node in row] for row in told]
        if self._drawn:
            proposal.drawn, proposal.probs = drawn, torch.stack(self._drawn)
        return proposal


def _worths(rows: list[list[Node]]) -> list[list[float]]:
    return [[node.worth for node in row] for row in rows]
