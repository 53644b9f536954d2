"""Drafts the likeliest next tokens by a table of n-grams that was counted beforehand.

Contract: a drafter (drafting/base.py) that runs no forward; its drafts are point masses.
"""

from __future__ import annotations

import torch

from ..models.ngram import NgramTable
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence
from .base import Drafter, Proposal, point_masses


class NgramDrafter(Drafter):
    """Proposes the likeliest token behind the longest context that the table knows, then goes on from there."""

    source = "n-gram"

    def __init__(self, table: NgramTable, device: torch.device, shortest: int = 1) -> None:
        self.table, self.device, self.shortest = table, device, shortest

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return point_masses([self._chain(row.tokens, most) for row, most in zip(rows, max_drafts, strict=True)])

    def _chain(self, tokens: list[int], count: int) -> list[int]:
        context, found = tokens[-self.table.longest :], []
        for _ in range(count):
            token = self.table.next_token(context, self.shortest)
            if token is None:
                break
            found.append(token)
            context = [*context, token][-self.table.longest :]
        return found
