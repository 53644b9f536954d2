"""Draft lengths without costs: one for all rows, fixed or by Algorithm 1, or those of an earlier run.

Contract: policies (base.py). `RecordedLengths`: with the same prompts, seed and drafter the run repeats itself,
sampled text included, whatever chose the lengths then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ..errors import RequestError
from .base import Feedback, Offer

LONGEST = 1024  # the longest draft, in tokens a row and round, that may be asked for


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
        """Nothing changes it."""


@dataclass
class Algorithm1:
    """BASS's own rule (arXiv 2404.15778, Algorithm 1): grow while a row accepts all, else fall to the best row.

    A round counts in which at least one row drafted the full length.
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
        """Learn that the best row accepted so many drafts of the full length."""
        if best == self.length:
            self.length, self.shrinking = min(self.length + self.increment, self.limit), 0
        else:
            step = math.ceil(self.length / self.modulus) + self.shrinking
            self.length, self.shrinking = max(1, best, self.length - step), 1


@dataclass
class RecordedLengths:
    """Replays the draft lengths of a batch: one entry for each round, then the longest of the last one.

    An entry is a length for all rows, or a list with one a row (Round.lengths).
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
                    f"RecordedLengths takes whole numbers from 0 to {LONGEST}, one for each round, or lists of "
                    f"them, one a row; got {entry!r}."
                )
        self.limit = max(map(_longest, self.recorded))

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """The lengths of the next round. Raises RequestError if it has other rows than were recorded."""
        entry = self.recorded[-1]
        if self.position < len(self.recorded):
            entry = self.recorded[self.position]
            if not isinstance(entry, int) and len(entry) != len(offers):
                raise RequestError(
                    f"RecordedLengths has {len(entry)} rows in round {self.position + 1}, and this batch "
                    f"{len(offers)}: use the prompts, seed and drafter of the recorded run."
                )
            if not isinstance(entry, int):
                return list(entry)
        return [_longest(entry)] * len(offers)

    def observe(self, feedback: Feedback) -> None:
        """A round has passed."""
        self.position += 1


def is_length(value: object) -> TypeGuard[int]:
    """Whether the value is a number of draft tokens that anyone may ask for."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST


def _longest(entry: int | Sequence[int]) -> int:
    return entry if isinstance(entry, int) else max(entry)
