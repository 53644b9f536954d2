"""How many tokens each row may draft in a round: what a decoder asks of a policy, and what it tells it.

Contract: a decoder calls `lengths` before each round, before anything of it is drawn, and `observe` after it;
nothing else changes a policy, so asking twice gives the same answer. A policy keeps its state in plain attributes,
so that each decoder can work on its own copy. A user's own policy is any object with these three members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Offer(NamedTuple):
    """What a row could draft in the coming round, by its text so far.

    most: tokens; one fewer than it may still write, since the target adds one of its own, and 0 where the drafter
    has none. source: who would draft them (Drafter.sources). forwards: whether that takes forwards of a draft
    model. unread: tokens that this model has to read first. row: which sequence it is (Sequence.id); its offers
    have the same number in every round.
    """

    most: int
    source: str = "drafter"
    forwards: bool = True
    unread: int = 0
    row: int = 0


class Feedback(NamedTuple):
    """What a round came to, a number a row in the order of the rows.

    offers: what `lengths` was asked about; lengths: what it said; drafted: the drafts that were verified, fewer
    where the drafter stopped; accepted: how many of them were accepted. draft_forwards: forwards of a draft model
    in this round. ms: the whole round's wall time in milliseconds, draft_ms: its drafting's; NaN where not
    measured.
    """

    offers: Sequence[Offer]
    lengths: list[int]
    drafted: list[int]
    accepted: list[int]
    draft_forwards: int
    ms: float
    draft_ms: float


class LengthPolicy(Protocol):
    """What a decoder asks of a policy. `limit`: the longest draft of a row that it will ever allow, in tokens."""

    @property
    def limit(self) -> int: ...

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """The most drafts of each row in the next round; the decoder cuts what is above an offer's `most`."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """Learn what a round after the prefill came to; plain rounds as well."""
        ...
