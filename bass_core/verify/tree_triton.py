"""The sampled walk of trees on an accelerator, with kernels/triton/walk.py. Importing this imports triton.

Decisions and noise are those of tree.py, which is the reference. PyTorch applies temperature, top-k and top-p. All
rows' decisions are copied to the host together.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from kernels.support import CompileFailed, on
from kernels.triton.walk import walk_trees

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.draw_triton import seed_on
from ..sample.noise import NoiseKeys
from ..sample.params import SamplingParams
from .acceptance import UNSOUND, DraftTest, RowOutcome, single_draft_chance
from .tree_shape import JudgedTree


def walk_on_device(logits: Tensor, tree: JudgedTree, keys: NoiseKeys, params: SamplingParams) -> Tensor:
    """Walk each row's tree by the target's logits [B, 1 + N, V]; returns the tensor of `packed_walks`.

    Raises:
        ValueError: if a draft was drawn from a row that `tree.probs` does not have.
    """
    device, width, probs = logits.device, logits.shape[1] - 1, tree.probs
    num_probs = 0 if probs is None else len(probs)
    rows_of_q = [_rows_of_q(r, tree, num_probs) for r in range(len(tree.parents))]
    padded = [[(row + [-2] * width)[:width] for row in rows] for rows in (tree.parents, rows_of_q)]
    # long(), because without any draft the lists are empty, and torch makes empty lists float tensors.
    parents, q_rows = to_device(padded, device).long().unbind(0)
    tokens = tree.on(device, width).long()
    return packed_walks(logits, probs, tokens, parents, q_rows, keys, params)


def packed_walks(
    logits: Tensor,
    probs: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    q_rows: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
) -> Tensor:
    """Walk each row's tree as one tensor for `outcomes_of`. Nothing is read on the host.

    Args:
        logits: [B, 1 + N, V], the target's.
        probs: float32 [D, V], the distributions of drawn drafts; None if no draft was drawn.
        tokens, parents, q_rows: int64 [B, N], the drafts, their parents and their rows of `probs` (walk_trees).
        keys: the round's noise keys.
        params: how tokens are sampled.
    """
    with on(logits.device):
        if probs is not None and len(probs):
            # A drawn child is ignored if its q is not finite, because it can't be judged.
            usable = probs.sum(-1).isfinite()[q_rows.clamp(min=0)]
            q_rows = q_rows.where(usable | (q_rows < 0), -2)
        p, seed = probabilities(logits, params), seed_on(keys.seed, logits.device)
        at = (keys.sequence_ids, keys.positions, keys.begins, seed)
        ends, chances, *tests = walk_trees(p, probs, tokens, parents, q_rows, *at)
        # Copy to the host once: ids are below 2**24, so float32 holds them exactly.
        return torch.cat((ends.float(), chances[:, None], *tests, tokens.float()), dim=1)


def outcomes_of(packed_on_device: Tensor, tree: JudgedTree) -> list[RowOutcome]:
    """Return the outcomes of the walks of `packed_walks` through these trees; waits for the device."""
    packed, width = to_host(packed_on_device).tolist(), (packed_on_device.shape[1] - 3) // 4
    if tree.device_tokens is not None:
        tree.set_tokens([list(map(int, row[3 + 3 * width :])) for row in packed])
    outcomes = []
    for r, (last, token, chance, *numbers) in enumerate(packed):
        drafted, path = tree.tokens[r], tree.path(r, int(last))
        columns = [numbers[i * width : i * width + len(drafted)] for i in range(3)]
        tests = [
            DraftTest(p, q, u, draft, single_draft_chance(p, q, u))
            for p, q, u, draft in zip(*columns, drafted, strict=True)
        ]
        outcomes.append(RowOutcome(len(path), int(token) if chance > 0 else UNSOUND, chance, tests, path=path))
    return outcomes


@cache
def can_walk(device: torch.device, vocab: int) -> bool:
    """Return whether the kernel can be compiled for the device and this vocabulary, by walking an empty tree."""
    none = torch.full((1, 1), -2, device=device)
    at = torch.zeros(4, 1, dtype=torch.long, device=device).unbind(0)
    with suppress(CompileFailed), on(device):
        p = torch.ones(1, 2, vocab, device=device)
        walk_trees(p, p[0], none.clamp(min=0), none, none, *at)
        return True
    return False


def _rows_of_q(row: int, tree: JudgedTree, num_probs: int) -> list[int]:
    """Return, for each draft of a row, the row of q it was drawn from, -1 for none, -2 for a repeated child."""
    drawn, parents = tree.drawn, tree.parents[row]
    if drawn is not None and not all(-1 <= place < num_probs for place in drawn[row]):
        raise ValueError(f"drafts were drawn from rows {drawn[row]} of {num_probs} distributions.")
    places = [-1] * len(parents) if drawn is None else drawn[row]
    if tree.device_tokens is not None:
        # Trees that the host has not read come from TreePlanner (draft/tree.py): no two siblings are equal.
        return places
    rows_of_q, seen = [], set()
    for child, place in zip(zip(parents, tree.tokens[row], strict=True), places, strict=True):
        rows_of_q.append(-2 if place < 0 and child in seen else place)
        if place < 0:
            seen.add(child)
    return rows_of_q
