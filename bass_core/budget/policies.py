"""Budgets in which all rows may draft alike: a policy says how many tokens, `EqualRows` makes a budget of it.

Contract: a policy's `length` is the draft length of the next round; its `update` is told, after a round in which
at least one row drafted that full length, how many drafts each unfinished row accepted. A policy keeps its state
in plain attributes, so that each decoder can work on its own copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from .base import Feedback

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
    """The budget (budget/base.py) in which every row may draft what one policy says."""

    def __init__(self, policy: DraftLengthPolicy) -> None:
        self.policy = policy

    @property
    def limit(self) -> int:
        return self.policy.limit

    def max_drafts(self, remaining: list[int]) -> list[int]:
        return [self.policy.length] * len(remaining)

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
