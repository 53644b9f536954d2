"""The rules of trees of drafts, enumerated in float64, and the shipped walk, counted against them.

Contract: every tree leaves the target's distribution as it is (total variation below 1e-12), and a rule with a
fault that others have shipped does not. The shipped `verify_tree` ends where the reference (tree_rule.py) says, as
often as it says; its greedy and coupled walks follow the target's own choices.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role, place_node
from bass_core.sample.params import SamplingParams
from bass_core.verify.acceptance import UNSOUND
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import DraftTree, verify_tree

from .tree_rule import (
    DEPTH,
    SHAPES,
    Path,
    Rule,
    Shape,
    Table,
    chain,
    distance,
    dropped_by_its_q,
    likely_tested_with_q,
    outcomes,
    pairs,
    ranked_by_its_q,
    siblings_in_q,
    tables,
    top_two,
    unchanged_residual,
    without,
)

WARM = SamplingParams(1.0)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tree_leaves_the_targets_distribution(shape: Shape, size: int) -> None:
    for seed, zeros in product(range(6), (False, True)):
        p, q = tables(size, seed, zeros)
        written = outcomes(p, q, shape)
        assert sum(written.values()) == pytest.approx(1, abs=1e-12)
        assert distance(p, written) < 1e-12


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (unchanged_residual, pairs),
        (dropped_by_its_q, chain),
        (dropped_by_its_q, pairs),
        (ranked_by_its_q, pairs),
        (siblings_in_q, pairs),
        (likely_tested_with_q, top_two),
    ],
)
def test_faults_that_others_shipped_show(rule: Rule, shape: Shape) -> None:
    found = []
    for seed in range(8):
        p, q = tables(4, seed)
        written = outcomes(p, q, shape, rule)
        assert sum(written.values()) == pytest.approx(1, abs=1e-12)
        found.append(distance(p, written))
    assert max(found) > 0.1 and np.median(found) > 0.01


def grown(q: Table, shape: Shape, keys: NoiseKeys) -> tuple[DraftTree, list[list[Path]]]:
    """A tree of that shape for every key, with the path of each draft; drawn as draft/tree.py draws."""
    rows = len(keys.positions)
    paths: list[list[Path]] = [[] for _ in range(rows)]
    tokens, parents, drawn = ([[] for _ in range(rows)] for _ in range(3))
    firsts = [-1] * rows
    probs: list[torch.Tensor] = []

    def add(row: int, parent: int, token: int, q_row: int) -> None:
        paths[row].append((*(paths[row][parent] if parent >= 0 else ()), token))
        tokens[row].append(token)
        parents[row].append(parent)
        drawn[row].append(q_row)

    for depth in range(DEPTH):
        asked = (
            [(r, -1) for r in range(rows)]
            if not depth
            else [(r, i) for r in range(rows) for i, path in enumerate(paths[r]) if len(path) == depth]
        )
        drawing = []
        for r, parent in asked:
            path = paths[r][parent] if parent >= 0 else ()
            others, draws = shape(q, path, firsts[r])
            for token in others:
                add(r, parent, token, -1)
            rest = without(q[path], others) if draws else None
            if rest is not None:
                drawing.append((r, parent, torch.tensor(rest, dtype=torch.float32)))
        if not drawing:
            continue
        at = torch.tensor([r for r, _, _ in drawing])
        nodes = torch.tensor([parent + 1 for _, parent, _ in drawing])
        places = place_node(keys.positions[at] + depth, nodes)
        weights = torch.stack([rest for _, _, rest in drawing])
        found = draw(weights, keys.seed, keys.sequence_ids[at], places, keys.stream(Role.DRAFT)[at])
        for (r, parent, rest), token in zip(drawing, found.tolist(), strict=True):
            add(r, parent, token, len(probs))
            probs.append(rest)
            firsts[r] = token if parent < 0 else firsts[r]
    return DraftTree(tokens, parents, drawn, torch.stack(probs) if probs else None), paths


def logits_of(p: Table, paths: list[list[Path]]) -> torch.Tensor:
    """float32 [B, 1 + N, V]: the target's behind the newest token and behind each draft; padding is NaN-free."""
    size, width = len(p[()]), max(map(len, paths))
    padded = [[p[()], *(p[path] for path in row)] + [np.ones(size)] * (width - len(row)) for row in paths]
    return torch.tensor(np.log(np.array(padded)), dtype=torch.float32)


def keys_of(rows: int, seed: int) -> NoiseKeys:
    return NoiseKeys(seed, torch.arange(rows), torch.full((rows,), 7))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_shipped_walk_ends_where_the_rule_says(shape: Shape) -> None:
    """Where a round ends counts as well: an exact rule that accepts less would fail."""
    rows = 3000
    p, q = tables(4, 2)
    keys = keys_of(rows, 2)
    tree, paths = grown(q, shape, keys)
    found = verify_tree(logits_of(p, paths), tree, keys, WARM, VERIFICATIONS["rejection"])
    seen: Counter[Path] = Counter()
    for r, outcome in enumerate(found):
        assert outcome.path is not None and outcome.accepted == len(outcome.path)
        stood = paths[r][outcome.path[-1]] if outcome.path else ()
        assert [tree.tokens[r][i] for i in outcome.path] == list(stood)
        assert outcome.next_p == pytest.approx(p[stood][outcome.next_token], rel=1e-4)
        text = (*stood, outcome.next_token)
        seen[text] += 1
    assert chi_squared(seen, outcomes(p, q, shape), rows) > 1e-3


def chi_squared(seen: Counter[Path], chances: dict[Path, float], total: int) -> float:
    """The p-value; texts expected fewer than five times are counted together."""
    assert set(seen) <= {text for text, chance in chances.items() if chance > 0}
    large = [text for text, chance in chances.items() if chance * total >= 5]
    counts = [seen[text] for text in large]
    expected = [chances[text] * total for text in large]
    rest = total - sum(expected)
    if rest >= 5:
        counts, expected = [*counts, total - sum(counts)], [*expected, rest]
    scale = sum(counts) / sum(expected)
    return float(stats.chisquare(counts, [scale * one for one in expected]).pvalue)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("text", ["greedy", "coupled"])
def test_greedy_and_coupled_walks_follow_the_targets_own_choices(text: str, shape: Shape) -> None:
    """The reference chooses one token after another; the longest such text that is drafted must stand."""
    rows, stood = 60, Counter()
    params, verification = (SamplingParams(), "rejection") if text == "greedy" else (WARM, "coupled")
    p, q = tables(4, 5)
    keys = keys_of(rows, 3)
    tree, paths = grown(q, shape, keys)
    # Nothing here was drawn as far as these walks know: any child will do.
    tree = DraftTree(tree.tokens, tree.parents)
    for r, outcome in enumerate(verify_tree(logits_of(p, paths), tree, keys, params, VERIFICATIONS[verification])):
        path: Path = ()
        while True:
            token = choice(p[path], text, r, len(path), keys)
            if (*path, token) not in paths[r]:
                break
            path = (*path, token)
        assert outcome.path is not None
        assert (tuple(tree.tokens[r][i] for i in outcome.path), outcome.next_token) == (path, token)
        assert outcome.next_p == pytest.approx(1.0 if text == "greedy" else p[path][token], rel=1e-4)
        stood[len(path)] += 1
    assert len(stood) > 1 or text == "greedy", "some texts must leave the tree and some not"


def choice(p: np.ndarray, text: str, row: int, depth: int, keys: NoiseKeys) -> int:
    if text == "greedy":
        return int(p.argmax())
    weights = torch.tensor(p, dtype=torch.float32)[None]
    ids, at = keys.sequence_ids[row : row + 1], keys.positions[row : row + 1] + depth
    return int(draw(weights, keys.seed, ids, at, torch.zeros(1, dtype=torch.long)))


@pytest.mark.parametrize(
    ("params", "verification"), [(SamplingParams(), "rejection"), (WARM, "coupled"), (WARM, "rejection")]
)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_whose_numbers_are_not_finite_is_marked(
    params: SamplingParams, verification: str, bad: float
) -> None:
    """Behind a draft that stands; the other rows are not touched."""
    tree = DraftTree([[0, 1], [0, 1]], [[-1, -1], [-1, -1]])
    logits = torch.full((2, 3, 4), -200.0)
    logits[:, 0, 1] = 0.0
    logits[:, 2, 3] = 0.0
    logits[1, 2] = bad
    fine, broken = verify_tree(logits, tree, keys_of(2, 1), params, VERIFICATIONS[verification])
    assert fine.path == [1] and fine.next_token == 3
    assert broken.next_token == UNSOUND


def test_a_draft_of_no_probability_is_never_accepted() -> None:
    """Not even by the smallest coin: what has probability 0 under the target is not written."""
    tree = DraftTree([[2]], [[-1]], [[0]], torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    logits = torch.tensor([[[0.0, 0.0, float("-inf"), 0.0], [0.0, 0.0, 0.0, 0.0]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bass_core.verify.tree.uniform", lambda *_: torch.zeros(1))
        (outcome,) = verify_tree(logits, tree, keys_of(1, 1), WARM, VERIFICATIONS["rejection"])
    assert outcome.path == [] and outcome.next_token != 2
