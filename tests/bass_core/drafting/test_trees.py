"""How trees grow: the best drafts first, within their limits, and for sampled texts blind to what is drawn.

Contract: the draft is a table, so that every tree can be reckoned by hand. What is asked of a real draft model and
of a draft head is in test_trees_fed.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from bass_core import FixedNodes, SamplingParams
from bass_core.budget.trees import Draft
from bass_core.drafting.base import Proposal, check_tree, point_masses
from bass_core.drafting.trees import growth as growing
from bass_core.drafting.trees.growth import Growth
from bass_core.drafting.trees.levels import Fed
from bass_core.sampling.distribution import probabilities
from bass_core.sampling.noise import NoiseKeys, Role
from bass_core.sequence import Sequence

Path = tuple[int, ...]
WARM = SamplingParams(1.0)
VOCAB = 5
# Greedy, coupled, and sampled by a rule of rejection.
TEXTS = [(SamplingParams(), Role.DRAFT), (WARM, Role.TARGET), (WARM, Role.DRAFT)]


def row(index: int) -> Sequence:
    return Sequence(index, index, [1, 2, 3], 100, frozenset())


class Table:
    """A draft whose logits are a fixed function of the row and the drafts before them (LevelModel)."""

    vocabulary = None
    reach = 62

    def __init__(self, vocab: int = VOCAB, sharp: float = 2.0, room: int = 62) -> None:
        self.vocab, self.sharp, self.room = vocab, sharp, room
        self.paths: list[list[Path]] = []

    def of(self, index: int, path: Path) -> torch.Tensor:
        """Logits [V]."""
        generator = torch.Generator().manual_seed(hash((index, *path)) % (1 << 40))
        return self.sharp * torch.randn(self.vocab, generator=generator)

    def root(self, rows: list[Sequence], wanted: list[bool]) -> torch.Tensor:
        self.paths = [[] for _ in rows]
        return torch.stack([self.of(one.index, ()) for one in rows])

    def level(self, drafts: list[list[Fed]]) -> torch.Tensor:
        width = max(map(len, drafts))
        logits = torch.zeros(len(drafts), width, self.vocab)
        for r, fed in enumerate(drafts):
            paths = [(*(self.paths[r][parent] if parent >= 0 else ()), token) for token, parent in fed]
            self.paths[r] += paths
            for i, path in enumerate(paths):
                logits[r, i] = self.of(r, path)
        return logits


class Recorder(FixedNodes):
    """Keeps what it was told that a round verifies."""

    told: list[list[Draft]]

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        self.told = drafts


def grow(
    grower: FixedNodes, params: SamplingParams, rows: int = 2, most: list[int] | None = None, room: int = 62,
    role: Role = Role.DRAFT, copied: list[list[list[int]]] | None = None, model: Any = None, seed: int = 0,
) -> tuple[Proposal, Growth]:  # fmt: skip
    keys = NoiseKeys(seed, torch.arange(rows), torch.full((rows,), 3))
    growth = Growth([row(i) for i in range(rows)], most or [62] * rows, room, keys, grower, params, role)
    proposal = growth.grow([point_masses(one) for one in copied or []], model or Table())
    return check_tree(proposal), growth


def paths_of(proposal: Proposal) -> list[list[Path]]:
    assert proposal.parents is not None
    found: list[list[Path]] = []
    for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=False):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(paths)
    return found


@pytest.mark.parametrize("nodes", [1, 4, 9, 17])
def test_the_best_drafts_of_all_rows_are_taken(nodes: int) -> None:
    """Against all texts of four tokens: a text's worth is the product of what the draft says of its tokens."""
    model = Table()
    worths = {}
    for r in range(3):
        for depth in range(1, 5):
            for path in product(range(VOCAB), repeat=depth):
                steps = [model.of(r, path[:i]).softmax(-1)[path[i]] for i in range(depth)]
                worths[r, path] = float(torch.stack(steps).prod())
    best = sorted(worths, key=lambda text: -worths[text])[:nodes]
    proposal, _ = grow(FixedNodes(nodes), SamplingParams(), rows=3, most=[4] * 3, model=model)
    assert {(r, path) for r, paths in enumerate(paths_of(proposal)) for path in paths} == set(best)


@pytest.mark.parametrize(("params", "role"), TEXTS)
def test_trees_stay_within_their_limits(params: SamplingParams, role: Role) -> None:
    """Depth, room, levels and the number of drafts; no draft twice behind one parent; parents first."""
    copies = [[[1, 2, 3, 4], [0, 0], []]]
    for most, room, levels, nodes in (
        ([3, 1, 0], 62, 8, 30),
        ([9, 9, 9], 4, 8, 30),
        ([9, 9, 9], 62, 2, 200),
        ([2] * 3, 9, 8, 5),
    ):
        proposal, growth = grow(
            FixedNodes(nodes, levels), params, rows=3, most=most, room=room, role=role, copied=copies
        )
        paths = paths_of(proposal)
        assert sum(map(len, paths)) <= nodes and growth.levels <= levels
        for r, found in enumerate(paths):
            assert len(found) == proposal.num_drafted[r] == len(set(found)) <= room
            assert all(len(path) <= most[r] for path in found)
    # With room to spare, all that was asked for is drafted.
    assert sum(grow(FixedNodes(12), params, role=role)[0].num_drafted) == 12


def told(proposal: Proposal, grower: Recorder) -> list[list[tuple[Any, ...]]]:
    """What is known of each draft before it is drawn."""
    assert proposal.drawn is not None
    return [
        [(one.parent, one.depth, one.kind, one.raw, one.worth, one.token * (one.kind != "drawn")) for one in row]
        for row in grower.told
    ]


@pytest.mark.parametrize("level", [1, 2])
def test_how_many_children_a_draft_gets_never_depends_on_what_is_drawn(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither their number nor what is thought of them, with other tokens drawn in the last level."""
    found, drawn = [], []
    draw = growing.draw
    for last in (False, True):
        calls = [0]

        def forced(weights: torch.Tensor, *keys: Any, last: bool = last, calls: list[int] = calls) -> torch.Tensor:
            calls[0] += 1
            if calls[0] < level:
                return draw(weights, *keys)
            # The likeliest token, or the least likely one of those that there are.
            return weights.argmax(-1) if last else weights.masked_fill(weights == 0, 2.0).argmin(-1)

        monkeypatch.setattr(growing, "draw", forced)
        grower = Recorder(14, levels=level)
        proposal, growth = grow(grower, WARM, rows=3, model=Table(9))
        assert calls[0] == growth.levels == level
        found.append(told(proposal, grower))
        drawn.append(proposal.tokens)
    assert found[0] == found[1] and not torch.equal(*drawn)


def test_a_drawn_draft_comes_from_q_without_its_siblings() -> None:
    proposal, _ = grow(FixedNodes(30), WARM, rows=3, copied=[[[1, 2], [3], []]], model=Table(9))
    assert proposal.drawn is not None and proposal.probs is not None and proposal.parents is not None
    checked = 0
    for r, paths in enumerate(paths_of(proposal)):
        for i, source in enumerate(proposal.drawn[r]):
            parent = proposal.parents[r][i]
            siblings = [paths[j][-1] for j, other in enumerate(proposal.parents[r]) if other == parent and j != i]
            if source < 0:
                continue
            q = probabilities(Table(9).of(r, paths[i][:-1])[None], WARM)[0]
            q[siblings] = 0
            torch.testing.assert_close(proposal.probs[source], q / q.sum())
            assert not any(proposal.drawn[r][j] >= 0 for j, other in enumerate(proposal.parents[r])
                           if other == parent and j != i)  # fmt: skip
            checked += len(siblings) > 0
    assert checked > 5
    used = [source for row in proposal.drawn for source in row if source >= 0]
    assert sorted(used) == list(range(len(proposal.probs)))


class Flat(Table):
    """Knows nothing."""

    def of(self, index: int, path: Path) -> torch.Tensor:
        return torch.zeros(self.vocab)


def test_drafts_at_one_position_have_noise_of_their_own() -> None:
    """Behind a drawn draft and behind a copy beside it, the same q draws different tokens."""
    same, met = 0, 0
    proposal, _ = grow(FixedNodes(1200), WARM, rows=200, model=Flat(64), copied=[[[5]] * 200])
    assert proposal.drawn is not None
    for r, paths in enumerate(paths_of(proposal)):
        second = [path[-1] for path, q in zip(paths, proposal.drawn[r], strict=True) if q >= 0 and len(path) == 2]
        for token in second[1:]:
            met, same = met + 1, same + (token == second[0])
    assert met > 50 and same < met / 4


@pytest.mark.parametrize(("params", "role"), TEXTS)
def test_copies_stand_beside_what_the_model_drafts_and_none_twice(params: SamplingParams, role: Role) -> None:
    model = Table()
    likely = int(model.of(0, ()).argmax())
    rare = int(model.of(0, ()).argmin())
    copied = [[[likely, 3, 3], [2, 2]], [[likely, 4], [2, 2, 1]], [[rare], []]]
    grower = Recorder(40)
    proposal, growth = grow(grower, params, role=role, copied=copied, model=model)
    first, second = paths_of(proposal)
    assert {(likely,), (likely, 3), (likely, 3, 3), (likely, 4), (rare,)} <= set(first)
    assert {(2,), (2, 2), (2, 2, 1)} <= set(second)
    kinds = [draft.kind for row in grower.told for draft in row]
    assert growth.modelled == len(kinds) - kinds.count("copied") > 0
    assert kinds.count("copied") == 8
    # Where the model says what was copied, that is one draft, and the model drafts behind it as well.
    assert first.count((likely,)) == 1
    behind = [own for own in grower.told[0] if own.kind != "copied" and own.parent >= 0]
    assert any(growth.nodes[0][own.parent].kind == "copied" for own in behind)


def test_no_model_is_asked_where_none_is_given_or_wanted() -> None:
    growth = Growth(
        [row(0)], [9], 62, NoiseKeys(0, torch.arange(1), torch.tensor([3])), FixedNodes(9), WARM, Role.DRAFT
    )
    proposal = growth.grow([point_masses([[1, 2]])], None)
    assert paths_of(proposal) == [[(1,), (1, 2)]] and proposal.probs is None and growth.levels == 0
    assert grow(FixedNodes(0), WARM)[0].num_drafted == [0, 0]
    assert grow(FixedNodes(9, levels=0), WARM)[1].levels == 0
