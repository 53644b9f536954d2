"""Repeating the draft lengths of an earlier run.

Contract: a budget (base.py). With the same prompts, seed and drafter the run repeats itself, sampled text included,
whatever chose the lengths then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import RequestError
from .base import Feedback
from .policies import LONGEST, is_length


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

    def max_drafts(self, remaining: list[int]) -> list[int]:
        """The lengths of the next round. Raises RequestError if it has other rows than were recorded."""
        entry = self.lengths[-1]
        if self.position < len(self.lengths):
            entry = self.lengths[self.position]
            if not isinstance(entry, int) and len(entry) != len(remaining):
                raise RequestError(
                    f"RecordedLengths has {len(entry)} rows in round {self.position + 1}, and this batch "
                    f"{len(remaining)}: use the prompts, seed and drafter of the recorded run."
                )
            if not isinstance(entry, int):
                return list(entry)
        return [_longest(entry)] * len(remaining)

    def observe(self, feedback: Feedback) -> None:
        """A round has passed."""
        self.position += 1


def _longest(entry: int | Sequence[int]) -> int:
    return entry if isinstance(entry, int) else max(entry)
