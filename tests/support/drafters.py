"""A drafter that fails."""

from __future__ import annotations

from typing import Any

import torch

from bass_core.draft.base import Proposal


class FailingDrafter:
    """Drafts token 3, and fails in one of its rounds.

    Args:
        in_round: The round that fails, counted from 1.
        error: The error to raise. If None, allocate more memory than exists, which raises torch's error.
    """

    calls = 0

    def __init__(self, in_round: int, error: Exception | None = None) -> None:
        self.in_round, self.error, self.rounds = in_round, error, 0

    def start(self, rows: Any) -> None:
        return None

    def propose(self, rows: Any, max_drafts: list[int], keys: Any) -> Proposal:
        self.rounds += 1
        if self.rounds == self.in_round:
            if self.error:
                raise self.error
            torch.empty(2**60)
        return Proposal(torch.full((len(rows), max(max_drafts)), 3), max_drafts)

    def on_verified(self, rows: Any, proposal: Any, accepted: Any) -> None:
        pass

    def move_row(self, source: int, target: int) -> None:
        pass
