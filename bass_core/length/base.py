"""How much each row may draft in a round.

Contract: a decoder asks `max_drafts` before each round, before anything of it is drawn, and calls `observe` after
it; nothing else changes a budget, so asking twice gives the same answer. A budget keeps its state in plain
attributes, so that each decoder can work on its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Offer(NamedTuple):
    """What a row could draft in the coming round, by its text so far.

    most: tokens; one fewer than it may still write, since the target adds one of its own, and 0 where the drafter
    has none. source: who would draft them (Drafter.sources). forwards: whether that takes forwards of a draft
    model. unread: tokens that this model has to read first.
    """

    most: int
    source: str = "drafter"
    forwards: bool = True
    unread: int = 0


class Feedback(NamedTuple):
    """What a round came to, a number a row in the order of the rows.

    offers: what `max_drafts` was asked about; requested: what it said; drafted: the drafts that were verified,
    fewer where the drafter stopped; accepted: how many of them stood. draft_forwards: forwards of a draft model in
    this round. ms: the whole round's wall time in milliseconds, draft_ms: its drafting's; NaN where not measured.
    """

    offers: Sequence[Offer]
    requested: list[int]
    drafted: list[int]
    accepted: list[int]
    draft_forwards: int
    ms: float
    draft_ms: float


class Budget(Protocol):
    """What a decoder asks of a budget. `limit` is the most drafts of one row that it will ever allow."""

    @property
    def limit(self) -> int: ...

    def max_drafts(self, offers: Sequence[Offer]) -> list[int]:
        """The most drafts of each row in the next round; the decoder cuts what is above an offer's `most`."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """Told of every round behind the prefill, plain ones included."""
        ...
