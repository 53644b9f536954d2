"""Rounds with trees of drafts, simulated: the real growth under the real planner, behind a draft of drawn chances.

Contract: a round does what BatchDecoder does with trees (bass_core/decoding/batch.py): `Growth` grows them, asks
the Grower (Planner, FixedNodes) and tells it what came of them; nothing of either is copied here. Seeded: the same
seed gives the same rounds.
Model of a node's acceptance, greedy texts: behind a draft that stood, the target's token is the draft's candidate
of rank j with chance a_j, so at most one child stands. a_1 is drawn for each node anew, least + (1 - least) x
Beta(spread x m, spread x (1 - m)), its mean being the pair's token acceptance; each further rank takes the same
share of what the ranks before it left, a_j = share x (1 - a_1 - ... - a_(j-1)). least = share / (1 + share) keeps
the ranks in order. The Grower is told these very chances as the draft's own, as of a draft that knows how sure it
is; it does not know what is drawn by them. A chain of first candidates is accepted at the rate a_1 a draft,
independently, as in bass_core/prediction/rounds.py, so a spread changes nothing for policies of one length.
SPREAD and SHARE are chosen so that the shipped head's measured table is met (sweep.py).
Non-goals: as that file's; sampled trees, copies, chances that the draft misjudges.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bass_core.budget.base import Feedback
from bass_core.budget.cost_table import RoundCosts
from bass_core.budget.planner import Planner
from bass_core.budget.policies import EqualRows
from bass_core.budget.trees import MOST_DRAFTS, FixedNodes
from bass_core.drafting.trees.growth import Growth
from bass_core.drafting.trees.levels import Fed
from bass_core.prediction.rounds import Played, round_ms
from bass_core.sampling.noise import NoiseKeys, Role
from bass_core.sampling.params import SamplingParams
from bass_core.sequence import Sequence
from kernels.plan import MOST_TREE

SPREAD, SHARE = 1.5, 0.3
# Candidates that have a chance: more than are ever children of one node.
RANKS = 24


@dataclass(frozen=True)
class Chances:
    """rates[d]: the mean of a_1 behind d drafts of the round; the last holds for all deeper ones."""

    rates: tuple[float, ...]
    spread: float = SPREAD
    share: float = SHARE

    def draw(self, rng: np.random.Generator, depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """The chances [N, RANKS] of the candidates behind nodes of these depths; they sum to 1."""
        least = self.share / (1 + self.share)
        rates = np.asarray(self.rates)[np.minimum(depths, len(self.rates) - 1)]
        mean = (rates - least) / (1 - least)
        first = least + (1 - least) * rng.beta(self.spread * mean, self.spread * (1 - mean))
        left = (1 - first)[:, None] * (1 - self.share) ** np.arange(RANKS - 1)
        found = np.concatenate((first[:, None], self.share * left), axis=1)
        return np.asarray(found / found.sum(axis=1, keepdims=True))


class SimulatedDraft:
    """A LevelModel (bass_core/drafting/trees/levels.py) whose tokens are ranks; `chances` by row and path."""

    vocabulary = None
    room = reach = MOST_DRAFTS

    def __init__(self, chances: Chances, rng: np.random.Generator) -> None:
        self._draw = lambda depths: chances.draw(rng, np.asarray(depths))
        self.chances: dict[tuple[int, tuple[int, ...]], NDArray[np.float64]] = {}
        self._fed: list[list[tuple[int, ...]]] = []

    reach = MOST_TREE

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        self._fed = [[] for _ in rows]
        found = self._draw([0] * len(rows))
        self.chances |= {(r, ()): row for r, row in enumerate(found)}
        return torch.from_numpy(found).log()

    def level(self, drafts: list[list[Fed]]) -> Tensor:
        made = torch.zeros(len(drafts), max(map(len, drafts)), RANKS, dtype=torch.float64)
        for r, row in enumerate(drafts):
            fed = self._fed[r]
            paths = [(*(fed[parent] if parent >= 0 else ()), token) for token, parent in row]
            fed += paths
            if paths:
                found = self._draw([len(path) for path in paths])
                self.chances |= {(r, path): one for path, one in zip(paths, found, strict=True)}
                made[r, : len(paths)] = torch.from_numpy(found).log()
        return made

    def accepted(self, rng: np.random.Generator, row: int, tokens: list[int], parents: list[int]) -> list[int]:
        """The path of the row's tree that stands: drafts of the proposal, from the first on."""
        children = {(parent, token): i for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
        followed = set(parents)
        path: list[int] = []
        ranks: tuple[int, ...] = ()
        node: int | None = -1
        while node in followed:
            sums = self.chances[row, ranks].cumsum()
            rank = int(np.searchsorted(sums, rng.random()))
            node = children.get((node, rank))
            if node is not None:
                path.append(node)
                ranks = (*ranks, rank)
        return path


@dataclass(frozen=True)
class PlayedTrees(Played):
    """A round of trees. asked: the depth of the deepest; levels: the draft's forwards.

    seconds: drafts that were not their parent's likeliest child.
    """

    levels: int = 0
    seconds: int = 0

    def ms(self, costs: RoundCosts) -> float:
        """One verification, and the levels of the draft."""
        return sum(round_ms(costs, self.drafted, self.levels, grown=True))


def tree_rounds(
    grower: Planner | FixedNodes, chances: Chances, rows: int, tokens: int | None, rng: np.random.Generator
) -> Iterator[PlayedTrees]:
    """The rounds of `rows` rows that each write `tokens` tokens after the prefill's; endless if None."""
    left = [1 << 60 if tokens is None else tokens] * rows
    live, budget = list(range(rows)) if left[0] else [], EqualRows(grower)
    while live:
        draft = SimulatedDraft(chances, rng)
        growth = _growth(live, [min(grower.limit, left[row] - 1) for row in live], grower)
        proposal = growth.grow([], draft)
        drafts, parents = proposal.tokens.tolist(), proposal.parents or []
        counts = proposal.num_drafted
        paths = [draft.accepted(rng, r, drafts[r][: counts[r]], parents[r]) for r in range(len(live))]
        accepted = [len(path) for path in paths]
        deepest = max((node.depth for row in growth.nodes for node in row if node.chosen), default=0)
        seconds = sum(token > 0 for row, count in zip(drafts, counts, strict=True) for token in row[:count])
        yield PlayedTrees(deepest, live, counts, accepted, growth.levels, seconds)
        requested = [grower.limit] * len(live)
        budget.observe(Feedback(requested, counts, accepted, growth.levels, parents, paths))
        for row, count in zip(live, accepted, strict=True):
            left[row] -= count + 1
        live = [row for row in live if left[row]]


def play_trees(
    grower: Planner | FixedNodes, chances: Chances, rows: int, tokens: int, seed: int = 0, trials: int = 4
) -> list[list[PlayedTrees]]:
    """`trials` runs of `rows` rows with `tokens` (2 or more) new tokens each, the first the prefill's."""
    return [
        list(tree_rounds(copy.deepcopy(grower), chances, rows, tokens - 1, np.random.default_rng((seed, trial))))
        for trial in range(trials)
    ]


def _growth(live: list[int], most: list[int], grower: Planner | FixedNodes) -> Growth:
    """The trees of a round of greedy texts; what their noise would be is never asked."""
    texts = [Sequence(row, row, [0], 1, frozenset()) for row in live]
    none = torch.zeros(len(live), dtype=torch.long)
    return Growth(texts, most, MOST_DRAFTS, NoiseKeys(0, none, none), grower, SamplingParams(), Role.DRAFT)
