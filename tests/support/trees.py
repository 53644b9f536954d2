"""Random trees of tokens, and their HostTreeMask."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bass_core.model.forward import HostTreeMask

# For each node, the index of its parent, which is an earlier node, or -1 for the row's newest token.
Parents = list[int]


def random_tree(rng: random.Random, nodes: int, deepest: int = 8, roots: int = 1) -> Parents:
    """Return a random tree of at most `deepest` levels, whose first `roots` nodes follow the newest token."""
    parents: Parents = []
    for node in range(nodes):
        possible = [earlier for earlier in range(node) if len(path(parents, earlier)) < deepest]
        parents.append(-1 if node < roots else rng.choice(possible))
    return parents


def path(parents: Parents, node: int) -> list[int]:
    """Return a node's ancestors, from the root on, and the node itself."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def batch_tree(trees: Sequence[Parents], fed: Sequence[int] | None = None) -> HostTreeMask:
    """Return the mask of a step that feeds these trees. The first fed[b] nodes of row b were fed earlier."""
    before = [0] * len(trees) if fed is None else list(fed)
    width = max(len(tree) - old for tree, old in zip(trees, before, strict=True))
    paths = [
        [path(tree, old + s) if old + s < len(tree) else [old + s] for s in range(width)]
        for tree, old in zip(trees, before, strict=True)
    ]
    sees = [[sum(1 << node for node in nodes) for nodes in row] for row in paths]
    return HostTreeMask(sees, [[len(nodes) - 1 for nodes in row] for row in paths], before)
