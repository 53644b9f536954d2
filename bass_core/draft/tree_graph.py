"""Trees of drafts in a CUDA graph: their shape (`full_tree`), how a graph grows them (`grow`), and their proposal.

Every row gets the full tree. A row that may draft less deep proposes the first levels of its tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sample.noise import NoiseKeys
from ..verify.tree_shape import TreeShape
from .base import TreeProposal
from .chain import Level, Levels
from .tree import TreePlanner


def full_tree(trees: TreePlanner, levels: int, columns: int) -> TreeShape:
    """Return the first levels of the trees that a model with that many columns drafts."""
    if trees.sampled:
        children = tuple(min(count - 1, columns) + 1 for count in trees.shape[:levels])
        return TreeShape(children, tuple(count - 1 for count in children))
    children = tuple(min(count, columns) for count in trees.shape[:levels])
    return TreeShape(children, (0,) * levels if trees.coupled else children)


def proposal_of(shape: TreeShape, tokens: Tensor, probs: Tensor | None, depths: list[int]) -> TreeProposal:
    """Return the drafts of each row's first depths[r] levels.

    Args:
        shape: the shape of all trees.
        tokens: int64 [B, N].
        probs: float32 [B, fed + 1, V], the distribution of each parent's drawn children, or None.
        depths: how deep each row drafts.
    """
    counts = [shape.firsts[min(depth, len(shape.children))] for depth in depths]
    parents = [shape.parents[:n] for n in counts]
    proposal = TreeProposal(tokens[:, : max(counts)], counts, parents=parents)
    proposal.shape = shape
    if probs is not None:
        places = probs.shape[1]
        proposal.drawn = [
            [place + r * places if place >= 0 else -1 for place in shape.drawn[:n]] for r, n in enumerate(counts)
        ]
        proposal.probs = probs.flatten(0, 1)
    return proposal


def grow(
    trees: TreePlanner,
    shape: TreeShape,
    levels: Levels,
    ids: Tensor | None,
    keys: NoiseKeys,
    probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draft full trees in R rows, without a read on the host.

    Args:
        trees: chooses and draws children.
        shape: the trees.
        levels: the draft's forwards.
        ids: the token id of each column, as LevelModel.vocabulary.
        keys: the round's noise keys.
        probs: float32 [R, fed + 1, V], to write the distributions to. None for greedy drafts.

    Returns:
        The drafts int64 [R, N] and each one's chance float32 [R, N].
    """
    tokens, chances = list[Tensor](), list[Tensor]()
    if probs is not None and ids is not None:
        probs.zero_()
    for level, count in enumerate(shape.children):
        logits = levels.send(Level(tokens[-1])) if level else next(levels)
        rows, width = logits.shape[:2]
        # The nodes of the level before: the newest token is node 0, and draft i is node i + 1.
        first = shape.firsts[level - 1] + 1 if level else 0
        nodes = torch.arange(first, first + width, device=logits.device).repeat(rows)
        at = torch.arange(rows, device=logits.device).repeat_interleave(width)
        chosen = trees.children(torch.stack((at, nodes)), logits.flatten(0, 1), ids, count, keys, level)
        if probs is not None and chosen.drawn_from is not None:
            place, q = probs[:, first : first + width], chosen.drawn_from.unflatten(0, (rows, width))
            spread(q, ids, place)
        tokens.append(chosen.tokens.view(rows, -1))
        chances.append(chosen.chances.float().reshape(rows, -1))
    return torch.cat(tokens, 1), torch.cat(chances, 1)


def spread(q: Tensor, ids: Tensor | None, out: Tensor) -> None:
    """Write q [..., V'], whose columns are the tokens `ids`, to `out` [..., V]."""
    if ids is None:
        out.copy_(q)
    else:
        out.index_copy_(-1, ids, q)
