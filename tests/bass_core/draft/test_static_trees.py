"""Trees of a fixed shape: each draft's children, and what they are drawn from.

Contract: the draft is a table. What is asked of a real draft model and of a draft head is in test_trees_fed.py;
that the text stays exact, in tests/conformance/test_enumeration.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bass_core.draft import tree as static
from bass_core.draft.base import TreeProposal
from bass_core.draft.tree import Fed, StaticTrees
from bass_core.sample.distribution import probabilities
from bass_core.sample.noise import NoiseKeys, Role
from bass_core.sample.params import SamplingParams
from bass_core.sequence import Sequence

Path = tuple[int, ...]
WARM = SamplingParams(1.0)
VOCAB = 5
# Greedy, coupled, and sampled by the tree rule.
TEXTS = [(SamplingParams(), Role.DRAFT), (WARM, Role.TARGET), (WARM, Role.DRAFT)]


class Table:
    """A model whose logits are a fixed function of the drafts behind the newest token (LevelModel)."""

    reach = 62

    def __init__(
        self, size: int = VOCAB, seed: int = 0, ids: list[int] | None = None, room: int = 62, flat: bool = False
    ) -> None:
        self.vocabulary = None if ids is None else torch.tensor(ids)
        self.size, self.seed, self.room, self.flat = size, seed, room, flat
        self.paths: list[list[Path]] = []

    def of(self, path: Path) -> torch.Tensor:
        """Logits [V']."""
        place = sum((token + 1) * 11**i for i, token in enumerate(path))
        generator = torch.Generator().manual_seed(1000 * self.seed + place)
        return torch.zeros(self.size) if self.flat else 2 * torch.randn(self.size, generator=generator)

    def root(self, rows: list[Sequence], wanted: list[bool]) -> torch.Tensor:
        self.paths = [[] for _ in rows]
        return self.of(()).expand(len(rows), -1)

    def level(self, drafts: list[list[Fed]]) -> torch.Tensor:
        logits = torch.zeros(len(drafts), max(map(len, drafts)), self.size)
        for r, fed in enumerate(drafts):
            paths = [(*(self.paths[r][parent] if parent >= 0 else ()), token) for token, parent in fed]
            self.paths[r] += paths
            for i, path in enumerate(paths):
                logits[r, i] = self.of(path)
        return logits


def propose(
    shape: tuple[int, ...], params: SamplingParams = WARM, role: Role = Role.DRAFT, *,
    model: Table | None = None, most: list[int] | None = None, rows: int = 2, size: int = VOCAB,
) -> TreeProposal:  # fmt: skip
    keys = NoiseKeys(0, torch.arange(rows), torch.full((rows,), 3))
    texts = [Sequence(i, i, [1, 2, 3], 100, frozenset()) for i in range(rows)]
    trees = StaticTrees(shape, params, role, size)
    return trees.propose(model or Table(), texts, most or [62] * rows, keys)


def paths_of(proposal: TreeProposal) -> list[list[Path]]:
    found: list[list[Path]] = []
    for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=False):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(paths)
    return found


@pytest.mark.parametrize(("params", "role"), TEXTS)
def test_every_draft_has_as_many_children_as_the_shape_says(params: SamplingParams, role: Role) -> None:
    proposal = propose((3, 2, 1), params, role, most=[9, 2, 0], rows=3)
    assert proposal.num_drafted == [15, 9, 0]
    for paths, deepest in zip(paths_of(proposal), (3, 2, 0), strict=True):
        assert len(set(paths)) == len(paths) and max(map(len, paths), default=0) == deepest
        for parent in [(), *(path for path in paths if len(path) < deepest)]:
            children = sum(path[:-1] == parent for path in paths)
            assert children == (3, 2, 1)[len(parent)] * (deepest > 0)


def test_the_models_room_and_reach_end_a_tree_at_a_level() -> None:
    assert propose((2, 2, 2), model=Table(room=3)).num_drafted == [6, 6]
    model = Table()
    model.reach = 1
    assert propose((2, 2, 2), model=model).num_drafted == [6, 6]


def test_a_greedy_drafts_children_are_the_likeliest() -> None:
    for path in (paths := paths_of(propose((2, 2), SamplingParams()))[0]):
        assert path[-1] in Table().of(path[:-1]).topk(2).indices
    assert len(paths) == 6


@pytest.mark.parametrize("ids", [None, [1, 4, 6, 8, 9]])
def test_a_drawn_child_comes_from_q_without_its_siblings(ids: list[int] | None) -> None:
    model = Table(ids=ids)
    proposal = propose((3, 2, 1), model=model, rows=3, size=10 if ids else VOCAB)
    assert proposal.drawn is not None and proposal.probs is not None
    named = list(range(VOCAB)) if ids is None else ids
    for r, paths in enumerate(paths_of(proposal)):
        for i, path in enumerate(paths):
            siblings = [j for j, other in enumerate(paths) if other[:-1] == path[:-1] and j != i]
            source = proposal.drawn[r][i]
            q = probabilities(model.of(path[:-1])[None], WARM)[0]
            if source < 0:
                assert q[named.index(path[-1])] in q.topk(len(siblings)).values
                continue
            assert all(proposal.drawn[r][j] < 0 for j in siblings)
            q[[named.index(paths[j][-1]) for j in siblings]] = 0
            whole = torch.zeros(proposal.probs.shape[-1])
            whole[named] = q / q.sum()
            torch.testing.assert_close(proposal.probs[source], whole)
    used = [source for row in proposal.drawn for source in row if source >= 0]
    assert sorted(used) == list(range(len(proposal.probs)))


@pytest.mark.parametrize("level", [1, 2])
def test_how_many_children_a_draft_gets_does_not_depend_on_what_is_drawn(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With top_p some q have fewer tokens than the shape asks for; other tokens are drawn in the last level."""
    found, drawn, draw = [], [], static.draw
    for likeliest in (True, False):
        calls = [0]

        def forced(weights: torch.Tensor, *keys: Any, most: bool = likeliest, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] < level:
                return draw(weights, *keys)
            return weights.argmax(-1) if most else weights.masked_fill(weights == 0, 2.0).argmin(-1)

        monkeypatch.setattr(static, "draw", forced)
        proposal = propose((3, 3)[:level], SamplingParams(1.0, top_p=0.95), model=Table(9), rows=3)
        found.append((proposal.parents, [[source >= 0 for source in row] for row in proposal.drawn or []]))
        drawn.append(proposal.tokens)
    assert found[0] == found[1] and not torch.equal(*drawn)


def test_drafts_at_one_position_have_noise_of_their_own() -> None:
    """Behind a likely draft and behind the drawn one beside it, the same q draws different tokens."""
    proposal = propose((2, 1), rows=200, model=Table(64, flat=True), size=64)
    seconds = [[path[-1] for path in paths if len(path) == 2] for paths in paths_of(proposal)]
    assert sum(one == two for one, two in seconds) < 30


def test_a_draft_that_says_nothing_usable_drafts_nothing() -> None:
    model = Table()
    model.of = lambda path: torch.full((VOCAB,), math.nan)  # type: ignore[method-assign]
    assert propose((3, 2), model=model).num_drafted == [0, 0]
