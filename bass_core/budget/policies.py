"""How many tokens to draft in the next round: one number for the whole batch.

Contract: `length` is the draft length of the next round; `update` is told, after a round in which at least one
row drafted that full length, how many drafts each unfinished row accepted. A policy keeps its state in plain
attributes, so that each decoder can work on its own copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from ..errors import RequestError

LONGEST = 1024  # draft tokens a row and round that anyone may ask for


class DraftLengthPolicy(Protocol):
    """What a decoder asks of a policy. `limit` is the largest length it will ever ask for.

    A policy with a method `observe(requested, drafted, accepted, forwards)` is moreover told of every round: the
    length requested, what each row drafted and accepted, and the draft's forwards.
    """

    limit: int

    @property
    def length(self) -> int: ...

    def update(self, accepted: list[int]) -> None: ...


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


@dataclass
class CommonStop(FixedLength):
    """A fixed length, and the whole batch stops at its first rejection: lengths stay alike, acceptance a turns
    into a^batch. What BASS does without, kept to be compared with. The text is distributed as ever: where a row
    had accepted more, its next accepted draft takes the place of the target's own token.
    """

    def cut(
        self, accepted: list[int], next_tokens: list[int], next_p: list[float], tests: list[list[list[float]]]
    ) -> list[bool]:
        """Shorten every row of a round to the shortest, in place; which were cut. Arguments: `Outcome.host`."""
        least = min(accepted)
        longer = [count > least for count in accepted]
        for row, cut in enumerate(longer):
            if cut:
                p, _, _, draft = tests[row][least]
                accepted[row], next_tokens[row], next_p[row] = least, int(draft), p
        return longer


@dataclass
class RecordedLengths:
    """The draft lengths of an earlier run again: one for each round, then the last for ever.

    With the same prompts, seed and drafter the run repeats itself, sampled text included, whatever chose them.
    """

    lengths: list[int]
    position: int = 0

    def __post_init__(self) -> None:
        if not self.lengths:
            raise RequestError("RecordedLengths needs at least one draft length.")
        for length in self.lengths:
            if not is_length(length):
                raise RequestError(
                    f"RecordedLengths takes whole numbers from 0 to {LONGEST}, one for each round; got {length!r}."
                )
        self.limit = max(self.lengths)

    @property
    def length(self) -> int:
        return self.lengths[self.position]

    def update(self, accepted: list[int]) -> None:
        """Nothing: `observe` hears of every round."""

    def observe(self, requested: int, drafted: list[int], accepted: list[int], forwards: int) -> None:
        self.position = min(self.position + 1, len(self.lengths) - 1)


def is_length(value: object) -> TypeGuard[int]:
    """Whether the value is a number of draft tokens that anyone may ask for."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST
