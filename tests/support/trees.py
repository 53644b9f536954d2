"""Random trees of tokens, and what a batch says of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bass_core.model.forward import BatchTree

# The node that each node follows, -1 for the row's newest token; it comes before the node.
Parents = list[int]


def random_tree(rng: random.Random, nodes: int, deepest: int = 8, roots: int = 1) -> Parents:
    """The parent of each node, which comes before it; -1: what the row holds already."""
    parents: Parents = []
    for node in range(nodes):
        possible = [one for one in range(node) if len(path(parents, one)) < deepest]
        parents.append(-1 if node < roots else rng.choice(possible))
    return parents


def path(parents: Parents, node: int) -> list[int]:
    """A node's ancestors in order, and itself."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def batch_tree(trees: Sequence[Parents], fed: Sequence[int] | None = None) -> BatchTree:
    """What a batch says of these trees, of which the first fed[b] nodes of row b were fed before."""
    before = [0] * len(trees) if fed is None else list(fed)
    width = max(len(tree) - old for tree, old in zip(trees, before, strict=True))
    paths = [
        [path(tree, old + s) if old + s < len(tree) else [old + s] for s in range(width)]
        for tree, old in zip(trees, before, strict=True)
    ]
    sees = [[sum(1 << node for node in one) for one in row] for row in paths]
    return BatchTree(sees, [[len(one) - 1 for one in row] for row in paths], before)
