"""The states that a draft head reads in AMUSD: the target's own where a verdict has brought them.

Contract: slot t of a row's text reads the state of token t - 1. Until a verdict brings the target's, the head's
own stands in. A step moves the states of all rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..models.draft_head import DraftHead
from .shared_memory import Arena


class HeadStates:
    """States [rows, length, hidden] of a request's texts, by row and position."""

    def __init__(self, head: DraftHead, arena: Arena, rows: int, length: int, device: torch.device) -> None:
        self.head, self.arena = head, arena
        self.values = torch.zeros(rows, length, head.config.hidden, device=device)
        self._brought: list[tuple[int, int, int]] = []

    def bring(self, row: int, first: int, stop: int) -> None:
        """A verdict has brought those of positions first .. stop - 1; `fetch` takes them over."""
        self._brought.append((row, first, stop))

    def fetch(self) -> None:
        """Take over what was brought."""
        if self._brought:
            rows = [row for row, first, stop in self._brought for _ in range(first, stop)]
            places = [at for _, first, stop in self._brought for at in range(first, stop)]
            self._brought = []
            self._store(rows, places, self.arena.read("states", rows, places, self.values.device))

    def keep(self, rows: list[int], places: list[int], states: Tensor, at: list[tuple[int, int]]) -> None:
        """The head's own: states[at[i]] of [B, S, hidden] stands in for row rows[i] at places[i]."""
        if rows:
            r, column = to_device(at, states.device).unbind(1)
            self._store(rows, places, states[r, column].float())

    def inputs(self, ids: Tensor, rows: list[int], starts: list[int]) -> Tensor:
        """What the head's body is fed [B, S, hidden] for ids int64 [B, S] at positions from starts[r] on."""
        last, width = self.values.shape[1] - 1, ids.shape[1]
        places = to_device([[min(start + i, last + 1) - 1 for i in range(width)] for start in starts], ids.device)
        before = self.values[to_device(rows, ids.device)[:, None], places.clamp(min=0)]
        if 0 in starts:  # before the first token there is none
            before = before.masked_fill((places < 0)[..., None], 0.0)
        return self.head.inputs(ids, before)

    def _store(self, rows: list[int], places: list[int], values: Tensor) -> None:
        device = self.values.device
        self.values[to_device(rows, device), to_device(places, device)] = values
