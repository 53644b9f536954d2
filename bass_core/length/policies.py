"""Length policies without costs: the same length in all rows (fixed or by Algorithm 1), or recorded lengths.

Given the same prompts, seed and drafter, `RecordedLengths` repeats a run, including sampled text, whichever policy
chose the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ..errors import RequestError
from .base import Feedback, Offer

LONGEST = 1024  # the longest draft length, in tokens per row and round


@dataclass
class FixedLength:
    """The same draft length in every round."""

    length: int

    @property
    def limit(self) -> int:
        return self.length

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Feedback) -> None:
        """Ignore the round."""


@dataclass
class Algorithm1:
    """BASS's own rule (arXiv 2404.15778, Algorithm 1).

    The length grows after a round in which some row accepts all its drafts. Otherwise it shrinks, but not below
    the number of drafts that the best row accepted. Rounds in which no row drafted the full length are ignored.
    """

    length: int = 7
    increment: int = 2
    modulus: int = 10
    limit: int = 32
    shrinking: int = 0

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Feedback) -> None:
        if self.length in feedback.drafted:
            self.update(max(feedback.accepted))

    def update(self, best: int) -> None:
        """Set the next length after a round in which the best row accepted `best` drafts."""
        if best == self.length:
            self.length, self.shrinking = min(self.length + self.increment, self.limit), 0
        else:
            step = math.ceil(self.length / self.modulus) + self.shrinking
            self.length, self.shrinking = max(1, best, self.length - step), 1


@dataclass
class RecordedLengths:
    """Replays recorded draft lengths, one entry per round. Later rounds use the last entry's longest length.

    An entry is one length for all rows, or a list with one length per row (Round.lengths). For example, [4, [3,
    0]] drafts 4 tokens in each row, then 3 and 0, then 3 in each row.
    """

    recorded: Sequence[int | Sequence[int]]
    position: int = 0
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.recorded:
            raise RequestError("RecordedLengths needs at least one draft length.")
        for entry in self.recorded:
            rows = entry if isinstance(entry, list | tuple) and entry else [entry]
            if not all(map(is_length, rows)):
                raise RequestError(
                    f"RecordedLengths takes whole numbers from 0 to {LONGEST}, one per round, or lists with one "
                    f"per row; got {entry!r}."
                )
        self.limit = max(map(_longest, self.recorded))

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """Return the lengths of the next round.

        Raises:
            RequestError: if the batch has a different number of rows than the recorded round.
        """
        entry = self.recorded[-1]
        if self.position < len(self.recorded):
            entry = self.recorded[self.position]
            # Lengths are also asked for before the prefill, which may end some rows: `observe` checks round 1.
            if self.position or isinstance(entry, int) or len(entry) >= len(offers):
                self._check(entry, len(offers))
                return [entry] * len(offers) if isinstance(entry, int) else list(entry)
        return [_longest(entry)] * len(offers)

    def observe(self, feedback: Feedback) -> None:
        """Go on to the next round.

        Raises:
            RequestError: if the first round had a different number of rows than the recorded one.
        """
        if not self.position:
            self._check(self.recorded[0], len(feedback.lengths))
        self.position += 1

    def _check(self, entry: int | Sequence[int], rows: int) -> None:
        if not isinstance(entry, int) and len(entry) != rows:
            raise RequestError(
                f"RecordedLengths has {len(entry)} rows in round {self.position + 1}, but this batch has {rows}: "
                "use the prompts, seed and drafter of the recorded run."
            )


def is_length(value: object) -> TypeGuard[int]:
    """Return whether the value is a valid number of draft tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST


def _longest(entry: int | Sequence[int]) -> int:
    return entry if isinstance(entry, int) else max(entry)
