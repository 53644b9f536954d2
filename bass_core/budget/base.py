"""How much each row may draft in a round.

Contract: a decoder asks `max_drafts` before each round and calls `observe` after it; nothing else changes a
budget, so asking twice gives the same answer. A budget keeps its state in plain attributes, so that each decoder
can work on its own copy.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Feedback(NamedTuple):
    """What a round came to, a number a row in the order of the rows.

    requested: what `max_drafts` said; drafted: the drafts that were verified, fewer where a row's end was near or
    the drafter stopped; accepted: how many of them stood. draft_forwards: forwards of a draft model in this round.
    """

    requested: list[int]
    drafted: list[int]
    accepted: list[int]
    draft_forwards: int


class Budget(Protocol):
    """What a decoder asks of a budget. `limit` is the most drafts of one row that it will ever allow."""

    @property
    def limit(self) -> int: ...

    def max_drafts(self, remaining: list[int]) -> list[int]:
        """The most drafts of each row in the next round; remaining[r]: the tokens that row r may still write.

        A row can use remaining[r] - 1 drafts, since the target adds a token of its own; the decoder cuts the rest.
        """
        ...

    def observe(self, feedback: Feedback) -> None:
        """Told of every round behind the prefill, plain ones included."""
        ...
