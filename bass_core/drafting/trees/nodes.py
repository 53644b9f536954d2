"""A draft of a tree while it grows, and what a decoder asks of a drafter that grows trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...budget.trees import Draft, Grower
from ...sampling.noise import NoiseKeys
from ...sequence import Sequence
from ..base import Proposal


@runtime_checkable
class GrowingDrafter(Protocol):
    """A drafter that can draft trees."""

    def grow(
        self, rows: list[Sequence], max_drafts: list[int], room: int, keys: NoiseKeys, grower: Grower
    ) -> Proposal:
        """Trees at most max_drafts[r] deep, of at most `room` drafts a row."""
        ...


@dataclass
class Node(Draft):
    """fed: which of the row's drafts that the model was fed it is, or -1; q: the row of `_drawn` it comes from."""

    fed: int = -1
    q: int = -1
    chosen: bool = False
