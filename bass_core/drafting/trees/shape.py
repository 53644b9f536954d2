"""The shape of a proposal: whether it is a tree at all, and how deep it is.

Contract: functions of a Proposal, which they don't change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...machine.transfer import to_device
from ..base import Proposal


def is_chain(proposal: Proposal) -> bool:
    """Whether each draft of each row follows the one before it."""
    return all(parents == list(range(-1, len(parents) - 1)) for parents in proposal.parents or ())


def chain_probs(proposal: Proposal, vocab: int) -> Tensor | None:
    """What each draft of a chain was drawn from, float32 [B, N, vocab], also where it is given as a tree's."""
    if proposal.parents is None or proposal.probs is None or proposal.drawn is None:
        return proposal.probs
    width = proposal.tokens.shape[1]
    padded = [(row + [-1] * width)[:width] for row in proposal.drawn]
    places = to_device(padded, proposal.probs.device)
    tokens = to_device(proposal.tokens, places.device)
    points = torch.zeros(*tokens.shape, vocab, device=places.device).scatter_(2, tokens[..., None], 1.0)
    return torch.where(places[..., None] < 0, points, proposal.probs[places])


def deepest(proposal: Proposal) -> int:
    """How many tokens the deepest draft of any row stands behind the newest one."""
    if proposal.parents is None:
        return max(proposal.num_drafted)
    found = 0
    for parents in proposal.parents:
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        found = max([found, *depths])
    return found
