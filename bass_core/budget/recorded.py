"""Repeating the draft lengths, and the trees, of an earlier run.

Contract: with the same prompts, seed and drafter the run repeats itself, sampled text included, whatever chose
them then. A planner's trees decide which noise a sampled text uses, so their shapes are recorded, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import RequestError
from .base import Feedback
from .policies import LONGEST, is_length
from .trees import MOST_DRAFTS, FixedNodes

_DRAFT = re.compile(r"[cld]\d*")
# Of one row's drafts: the letter of its kind, and the draft that it follows, or -1.
Shape = list[tuple[str, int]]


class ReplayedTrees(FixedNodes):
    """A Grower of one recorded round: shapes[r] for the rows in the order of their batch."""

    def __init__(self, owner: RecordedLengths, shapes: list[Shape]) -> None:
        super().__init__(MOST_DRAFTS)
        self.owner, self.shapes = owner, shapes

    def observe_trees(self, feedback: Feedback) -> None:
        self.owner.advance()


@dataclass
class RecordedLengths:
    """Replays the drafts of an earlier run: one entry for each round, then the last one again and again.

    An entry is a draft length, or of a round that a planner planned the shape of each row's drafts in the order of
    the rows (RowRound.shape; None for a row without).
    """

    lengths: Sequence[int | Sequence[str | None]]
    position: int = 0
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.lengths:
            raise RequestError("RecordedLengths needs at least one draft length.")
        self._shapes: list[list[Shape] | None] = []
        for entry in self.lengths:
            shapes = None if is_length(entry) else _shapes(entry)
            if shapes is None and not is_length(entry):
                raise RequestError(
                    f"RecordedLengths takes whole numbers from 0 to {LONGEST}, one for each round; got {entry!r}."
                )
            self._shapes.append(shapes)
        deepest = [entry if isinstance(entry, int) else MOST_DRAFTS for entry in self.lengths]
        self.limit = max(deepest)

    @property
    def length(self) -> int:
        """The draft length of the next round."""
        entry = self.lengths[self.position]
        return entry if isinstance(entry, int) else MOST_DRAFTS

    @property
    def grower(self) -> ReplayedTrees | None:
        """The trees of the next round, if it had any."""
        shapes = self._shapes[self.position]
        return None if shapes is None else ReplayedTrees(self, shapes)

    def update(self, accepted: list[int]) -> None:
        """Does nothing: `observe` is told of every round."""

    def observe(self, requested: int, drafted: list[int], accepted: list[int], forwards: int) -> None:
        self.advance()

    def advance(self) -> None:
        """A round has passed."""
        self.position = min(self.position + 1, len(self.lengths) - 1)


def _shapes(entry: object) -> list[Shape] | None:
    """The shapes of a round's rows; None where they are none."""
    if not isinstance(entry, list | tuple) or not all(row is None or isinstance(row, str) for row in entry):
        return None
    found = []
    for row in entry:
        drafts = (row or "").split()
        if not all(_DRAFT.fullmatch(draft) for draft in drafts):
            return None
        shape = [(draft[0], int(draft[1:] or -1)) for draft in drafts]
        if any(parent >= i for i, (_, parent) in enumerate(shape)):
            return None
        found.append(shape)
    return found
