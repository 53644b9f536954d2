"""The sampled walk of trees on an accelerator: the same decisions with the same noise, by kernels/triton/walk.py.

Contract: tree.py is the reference. PyTorch applies temperature, top-k and top-p. One copy to the host brings all
rows' decisions. Importing this module imports triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.support import on
from kernels.triton.walk import walk_trees

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.draw_triton import seed_on
from ..sample.noise import NoiseKeys
from ..sample.params import SamplingParams
from .acceptance import UNSOUND, DraftTest, chance_alone
from .draft_tree import DraftTree

# The last draft of a row's path or -1, the token after it or UNSOUND, its chance, and the drafts' tests.
Walked = tuple[int, int, float, list[DraftTest]]


def walk_on_device(logits: Tensor, tree: DraftTree, keys: NoiseKeys, params: SamplingParams) -> list[Walked]:
    """Each row's walk by logits [B, 1 + N, V].

    Raises ValueError for a draft that was drawn from none of the rows of `tree.probs`.
    """
    device, width, probs = logits.device, logits.shape[1] - 1, tree.probs
    known = 0 if probs is None else len(probs)
    rows_of_q = [_rows_of_q(r, tree, known) for r in range(len(tree.parents))]
    padded = [[(row + [-2] * width)[:width] for row in rows] for rows in (tree.parents, rows_of_q)]
    with on(device):
        # Where no row has a draft, the lists are empty and their type is lost.
        parents, q_rows = to_device(padded, device).long().unbind(0)
        tokens = tree.on(device, width).long()
        if probs is not None and len(probs):
            # A drawn child that can't be judged counts as no child.
            fit = probs.sum(-1).isfinite()[q_rows.clamp(min=0)]
            q_rows = q_rows.where(fit | (q_rows < 0), -2)
        seed = seed_on(keys.seed, device)
        p = probabilities(logits, params)
        where = (keys.sequence_ids, keys.positions, keys.begins, seed)
        ends, chances, *tests = walk_trees(p, probs, tokens, parents, q_rows, *where)
        # One copy to the host: ids are below 2**24, so float32 holds them.
        packed = to_host(torch.cat((ends.float(), chances[:, None], *tests, tokens.float()), dim=1)).tolist()
    if tree.placed is not None:
        tree.arrive([list(map(int, row[3 + 3 * width :])) for row in packed])
    found: list[Walked] = []
    for drafted, (last, token, chance, *numbers) in zip(tree.tokens, packed, strict=True):
        columns = [numbers[i * width : i * width + len(drafted)] for i in range(3)]
        of_drafts = [
            DraftTest(p, q, u, draft, chance_alone(p, q, u))
            for p, q, u, draft in zip(*columns, drafted, strict=True)
        ]
        found.append((int(last), int(token) if chance > 0 else UNSOUND, chance, of_drafts))
    return found


def _rows_of_q(row: int, tree: DraftTree, known: int) -> list[int]:
    """For each draft of a row: the row of q it was drawn from, -1 for none, -2 for a child like one before it.

    No two are alike where the host has not read them: those of StaticTrees (draft/tree.py).
    """
    drawn, parents = tree.drawn, tree.parents[row]
    if drawn is not None and not all(-1 <= place < known for place in drawn[row]):
        raise ValueError(f"drafts were drawn from rows {drawn[row]} of {known} distributions.")
    places = [-1] * len(parents) if drawn is None else drawn[row]
    if tree.placed is not None:
        return places
    found, others = [], set()
    for child, place in zip(zip(parents, tree.tokens[row], strict=True), places, strict=True):
        found.append(-2 if place < 0 and child in others else place)
        if place < 0:
            others.add(child)
    return found
