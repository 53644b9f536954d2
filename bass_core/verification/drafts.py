"""The drafts of a round as a reader is told of them, chains and trees alike.

Contract: plain data and functions of it; nothing here decides what stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sequence import depths_of


@dataclass
class Drafts:
    """The drafts of a round: lists by row, each as long as the row has drafts.

    parents, drawn: see Proposal; None: chains. probs: for chains float32 [B, N, V] (None: point masses), for trees
    float32 [D, V]. sources: who proposed each. own: gives each draft's probability at temperature 1, where known.
    """

    tokens: list[list[int]]
    sources: list[list[str]]
    parents: list[list[int]] | None = None
    drawn: list[list[int]] | None = None
    probs: Tensor | None = None
    own: Callable[[], list[list[float | None]]] | None = None

    def behind(self, row: int, node: int) -> int | None:
        """The draft behind `node` (-1: the newest token) that a draw of the target's own stands for; None: none.

        In a tree that is the drawn one, or else the first.
        """
        if self.parents is None:
            return node + 1 if node + 1 < len(self.tokens[row]) else None
        children = [i for i, parent in enumerate(self.parents[row]) if parent == node]
        drawn = [i for i in children if self.drawn is not None and self.drawn[row][i] >= 0]
        return next(iter([*drawn, *children]), None)

    def drawn_from(self, row: int, draft: int, size: int) -> Tensor | None:
        """q [size] of a draft that a test rejected; None for a tree's draft that was not drawn."""
        assert self.probs is None or self.probs.shape[-1] == size
        if self.parents is None and self.probs is not None:
            return self.probs[row, draft]
        if self.parents is None:
            return torch.zeros(size).index_fill_(0, torch.tensor(self.tokens[row][draft]), 1.0)
        place = -1 if self.drawn is None else self.drawn[row][draft]
        return None if place < 0 or self.probs is None else self.probs[place]


def kept_drafts(path: list[int], count: int, parents: list[int] | None, taken: int) -> list[int]:
    """Of a row's `count` drafts those that are told, where `taken` tokens were appended.

    Drafts behind the end of a text that ended among the accepted ones count as never tested.
    """
    if taken > len(path):
        return list(range(count))
    if parents is None:
        return list(range(taken))
    return [draft for draft, deep in enumerate(depths_of(parents)) if deep <= taken]
