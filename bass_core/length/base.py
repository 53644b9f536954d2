"""Length policies decide how many tokens each row may draft in a round (`LengthPolicy`).

A decoder calls `lengths` before it drafts, and `observe` after each round. Only `observe` changes a policy, so two
calls of `lengths` between them give the same answer. A policy keeps its state in plain attributes, so that each
decoder can work on a deep copy (`own_copy`). A user's policy is any object with these three members.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import MemoryShortage, RequestError
from ..machine.memory import shortage_explained

T = TypeVar("T")


class Offer(NamedTuple):
    """The drafts that a row could get in the coming round, judged by its text so far.

    Attributes:
        most: maximum number of drafts: one fewer than the tokens that the row may still write, since the target
            adds one; 0 if the drafter has nothing to propose.
        source: who would draft them (Drafter.source).
        forwards: whether drafting takes forwards of a draft model.
        unread: number of tokens that the draft model has to read first.
        row: the row's Sequence.id, which is the same in every round.
        certain: the number of drafts that are certain to be accepted, because a grammar forces them. If it is not
            0, no more than these are drafted.
    """

    most: int
    source: str = "drafter"
    forwards: bool = True
    unread: int = 0
    row: int = 0
    certain: int = 0


class Feedback(NamedTuple):
    """The result of a round. Lists have one entry per row, in the order of the rows.

    Attributes:
        lengths: the lengths that it returned.
        drafted: verified drafts, fewer than `lengths` if the drafter stopped early.
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


def check_lengths(lengths: object, offers: Sequence[Offer], limit: int) -> list[int]:
    """Return a policy's draft lengths if there is a whole number from 0 to `limit` for each row.

    Raises:
        RequestError: if there is not.
    """
    if not isinstance(lengths, list | tuple) or len(lengths) != len(offers):
        raise RequestError(
            "`lengths` of the draft_length object must return a list with one length per row, here "
            f"{len(offers)}; got {lengths!r:.80}."
        )
    whole = [whole_number(length) for length in lengths]
    for length, number in zip(lengths, whole, strict=True):
        if number is None or not 0 <= number <= limit:
            raise RequestError(
                "`lengths` of the draft_length object must return whole numbers from 0 to its `limit`, which must "
                f"not grow, here {limit}; got {length!r:.80}."
            )
    return [number for number in whole if number is not None]


def whole_number(value: Any) -> int | None:
    """Return an int, a NumPy integer or the like as an int, or None for other values and booleans."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def own_copy(value: T, role: str) -> T:
    """Return a deep copy of a user's object, so that decoders and calls don't influence each other.

    Raises:
        RequestError: if it can't be copied.
        MemoryShortage: if the device has no room for a copy.
    """
    try:
        with shortage_explained():
            return copy.deepcopy(value)
    except MemoryShortage:
        raise
    except Exception as error:
        raise RequestError(
            f"The {role} can't be copied ({type(error).__name__}: {error}), and each decoder works on a deep "
            "copy: give its class a __deepcopy__."
        ) from error
