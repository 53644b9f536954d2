"""Draft lengths without costs: one for all rows, by a policy, or those of an earlier run.

Contract: a policy's `length` is the draft length of the next round; its `update` is told, after a round in which
at least one row drafted that full length, how many drafts each unfinished row accepted. A policy keeps its state
in plain attributes, so that each decoder can work on its own copy. `EqualRows` makes a budget of it.
`RecordedLengths` is a budget by itself: with the same prompts, seed and drafter the run repeats itself, sampled
text included, whatever chose the lengths then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from ..errors import RequestError
from .base import Feedback, Offer

LONGEST = 1024  # the longest draft, in tokens a row and round, that may be asked for


class DraftLengthPolicy(Protocol):
    """What a decoder asks of a policy. `limit` is the largest length it will ever ask for.

    A policy with a method `observe(requested, drafted, accepted, forwards)` is moreover told of every round: the
    length requested, what each row drafted and accepted, and the draft's forwards.
    """

    limit: int

    @property
    def length(self) -> int: ...

    def update(self, accepted: list[int]) -> None: ...


class EqualRows:
    """The budget (length/base.py) in which every row may draft what one policy says."""

    def __init__(self, policy: DraftLengthPolicy) -> None:
        self.policy = policy

    @property
    def limit(self) -> int:
        return self.policy.limit

    def max_drafts(self, offers: Sequence[Offer]) -> list[int]:
        return [self.policy.length] * len(offers)

    def observe(self, feedback: Feedback) -> None:
        length = feedback.requested[0]
        told: Any = getattr(self.policy, "observe", None)
        if told is not None:
            told(length, feedback.drafted, feedback.accepted, feedback.draft_forwards)
        if length in feedback.drafted:
            self.policy.update(feedback.accepted)


@dataclass
class FixedLength:
    """The same draft length in every round."""

    length: int

    def __post_init__(self) -> None:
        self.limit = self.length

    def update(self, accepted: list[int]) -> None:
        return None


@dataclass
class Algorithm1:
    """BASS's own rule (arXiv 2404.15778, Algorithm 1): grow while a row accepts all, else fall to the best row."""

    length: int = 7
    increment: int = 2
    modulus: int = 10
    limit: int = 32
    shrinking: int = 0

    def update(self, accepted: list[int]) -> None:
        best = max(accepted)
        if best == self.length:
            self.length, self.shrinking = min(self.length + self.increment, self.limit), 0
        else:
            step = math.ceil(self.length / self.modulus) + self.shrinking
            self.length, self.shrinking = max(1, best, self.length - step), 1


def is_length(value: object) -> TypeGuard[int]:
    """Whether the value is a number of draft tokens that anyone may ask for."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST


@dataclass
class RecordedLengths:
    """Replays the draft lengths of a batch: one entry for each round, then the longest of the last one.

    An entry is a length for all rows, or a list with one a row (Round.lengths).
    """

    lengths: Sequence[int | Sequence[int]]
    position: int = 0
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.lengths:
            raise RequestError("RecordedLengths needs at least one draft length.")
        for entry in self.lengths:
            rows = entry if isinstance(entry, list | tuple) and entry else [entry]
            if not all(map(is_length, rows)):
                raise RequestError(
                    f"RecordedLengths takes whole numbers from 0 to {LONGEST}, one for each round, or lists of "
                    f"them, one a row; got {entry!r}."
                )
        self.limit = max(map(_longest, self.lengths))

    def max_drafts(self, offers: Sequence[Offer]) -> list[int]:
        """The lengths of the next round. Raises RequestError if it has other rows than were recorded."""
        entry = self.lengths[-1]
        if self.position < len(self.lengths):
            entry = self.lengths[self.position]
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


def _longest(entry: int | Sequence[int]) -> int:
    return entry if isinstance(entry, int) else max(entry)
