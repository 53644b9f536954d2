"""`verify_tree` writes each text as often as the enumerated rule of tree_rule.py.

tests/conformance/test_enumeration.py shows that the text has the target's distribution. A rule that accepts too
few drafts would pass that test, but not the tests here.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role, place_node
from bass_core.sample.params import SamplingParams
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree
from bass_core.verify.tree_shape import JudgedTree
from tests.bass_core.verify.tree_rule import DEPTH, SHAPES, Path, Shape, Table, outcomes, tables, without

SAMPLED = SamplingParams(1.0)


def grow(q: Table, shape: Shape, keys: NoiseKeys) -> tuple[JudgedTree, list[list[Path]]]:
    """Return a tree of that shape for every key, drawn as in draft/tree.py, and the path of each draft."""
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
        parents_to_extend = (
            [(r, -1) for r in range(rows)]
            if not depth
            else [(r, i) for r in range(rows) for i, path in enumerate(paths[r]) if len(path) == depth]
        )
        drawing = []
        for r, parent in parents_to_extend:
            path = paths[r][parent] if parent >= 0 else ()
            others, draws = shape(q, path, firsts[r])
            for token in others:
                add(r, parent, token, -1)
            rest = without(q[path], others) if draws else None
            if rest is not None:
                drawing.append((r, parent, torch.tensor(rest, dtype=torch.float32)))
        if not drawing:
            continue
        drawing_rows = torch.tensor([r for r, _, _ in drawing])
        nodes = torch.tensor([parent + 1 for _, parent, _ in drawing])
        places = place_node(keys.positions[drawing_rows] + depth, nodes)
        weights = torch.stack([rest for _, _, rest in drawing])
        drawn_tokens = draw(
            weights, keys.seed, keys.sequence_ids[drawing_rows], places, keys.stream(Role.DRAFT)[drawing_rows]
        )
        for (r, parent, rest), token in zip(drawing, drawn_tokens.tolist(), strict=True):
            add(r, parent, token, len(probs))
            probs.append(rest)
            firsts[r] = token if parent < 0 else firsts[r]
    return JudgedTree(tokens, parents, drawn, torch.stack(probs) if probs else None), paths


def logits_of(p: Table, paths: list[list[Path]]) -> torch.Tensor:
    """Return the target's logits, float32 [B, 1 + N, V], after the newest token and each draft; padding is 0."""
    size, width = len(p[()]), max(map(len, paths))
    padded = [[p[()], *(p[path] for path in row)] + [np.ones(size)] * (width - len(row)) for row in paths]
    return torch.tensor(np.log(np.array(padded)), dtype=torch.float32)


def keys_of(rows: int, seed: int) -> NoiseKeys:
    return NoiseKeys(seed, torch.arange(rows), torch.full((rows,), 7))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_text_is_written_as_often_as_the_rule_predicts(shape: Shape) -> None:
    rows = 3000
    p, q = tables(4, 2)
    keys = keys_of(rows, 2)
    tree, paths = grow(q, shape, keys)
    results = verify_tree(logits_of(p, paths), tree, keys, SAMPLED, VERIFICATIONS["rejection"])
    seen: Counter[Path] = Counter()
    for r, outcome in enumerate(results):
        assert outcome.path is not None and outcome.accepted == len(outcome.path)
        accepted_path = paths[r][outcome.path[-1]] if outcome.path else ()
        assert [tree.tokens[r][i] for i in outcome.path] == list(accepted_path)
        assert outcome.next_p == pytest.approx(p[accepted_path][outcome.next_token], rel=1e-4)
        text = (*accepted_path, outcome.next_token)
        seen[text] += 1
    assert chi_squared(seen, outcomes(p, q, shape), rows) > 1e-3


def chi_squared(seen: Counter[Path], chances: dict[Path, float], total: int) -> float:
    """Return the test's p-value. Texts that are expected fewer than five times are pooled."""
    assert set(seen) <= {text for text, chance in chances.items() if chance > 0}
    large = [text for text, chance in chances.items() if chance * total >= 5]
    counts = [seen[text] for text in large]
    expected = [chances[text] * total for text in large]
    rest = total - sum(expected)
    if rest >= 5:
        counts, expected = [*counts, total - sum(counts)], [*expected, rest]
    scale = sum(counts) / sum(expected)
    return float(stats.chisquare(counts, [scale * value for value in expected]).pvalue)
