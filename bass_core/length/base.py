"""Length policies decide how many tokens each row may draft in a round (`LengthPolicy`).

A decoder calls `lengths` before it drafts, and `observe` after each round. Only `observe` changes a policy, so two
calls of `lengths` between them give the same answer. A policy keeps its state in plain attributes, so that each
decoder can work on a copy. A user's policy is any object with these three members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Offer(NamedTuple):
    """The drafts that a row could get in the coming round, judged by its text so far.

    Attributes:
        most: maximum number of drafts: one fewer than the tokens that the row may still write, since the target
            adds one; 0 if the drafter has nothing to propose.
        source: who would draft them (Drafter.source).
        forwards: whether drafting takes forwards of a draft model.
        unread: number of tokens that the draft model has to read first.
        row: the row's Sequence.id, which is the same in every round.
    """

    most: int
    source: str = "drafter"
    forwards: bool = True
    unread: int = 0
    row: int = 0


class Feedback(NamedTuple):
    """The result of a round. Lists have one entry per row, in the order of the rows.

    Attributes:
        offers: the offers that `lengths` was called with.
        lengths: the lengths that it returned.
        drafted: verified drafts, fewer than `lengths` if the drafter stopped early.
        accepted: accepted drafts.
        draft_forwards: forwards of a draft model in this round.
        ms: wall time of the round in milliseconds, NaN if not measured.
        draft_ms: wall time of its drafting, NaN if not measured.
    """

    offers: Sequence[Offer]
    lengths: list[int]
    drafted: list[int]
    accepted: list[int]
    draft_forwards: int
    ms: float
    draft_ms: float


class LengthPolicy(Protocol):
    """The interface of a policy. `limit` is the longest draft, in tokens, that it will ever allow for a row."""

    @property
    def limit(self) -> int: ...

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """Return each row's draft length for the next round; lengths above an offer's `most` are cut to it."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """Learn from a round. Plain rounds are included, the prefill is not."""
        ...
