"""Growing the trees of a recorded round again.

Contract: a Growth whose shapes are given (budget/recorded.py). As many children are drafted behind each draft as
then, so a sampled text draws from the same distributions with the same noise.
"""

from __future__ import annotations

from typing import Any

from ...budget.recorded import ReplayedTrees
from .growth import Growth, Open


def make_growth(*arguments: Any) -> Growth:
    """The growth of a round's trees; arguments as for Growth."""
    return Replay(*arguments) if isinstance(arguments[4], ReplayedTrees) else Growth(*arguments)


class Replay(Growth):
    """The trees of one recorded round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shapes = self.grower.shapes if isinstance(self.grower, ReplayedTrees) else []
        self.shapes = [*shapes, *([] for _ in self.rows)][: len(self.rows)]
        # By row: which recorded draft each draft here is, where it is one.
        self._of: list[dict[int, int]] = [{} for _ in self.rows]

    def _choose(self) -> None:
        """Choose the drafts that were recorded: copies by their order behind each parent, the others as made."""
        for r, row in enumerate(self.nodes):
            of, here = self._of[r], {-1: -1} | {then: now for now, then in self._of[r].items()}
            for then, (kind, parent) in enumerate(self.shapes[r]):
                if then in here or parent not in here:
                    continue
                for now, node in enumerate(row):
                    if now not in of and node.parent == here[parent] and node.kind[0] == kind:
                        of[now], here[then], node.chosen = then, now, True
                        break
            for now, node in enumerate(row):
                node.chosen = now in of

    def _pays(self, asked: list[Open]) -> bool:
        return any(self._children(r, i) or self._behind(r, i) for r, i in asked)

    def _unasked(self, room: int, reach: int) -> list[Open]:
        return [(r, i) for r, i in super()._unasked(room, reach) if self._children(r, i) or self._behind(r, i)]

    def _sampled_counts(self, asked: list[Open], likely: list[list[list[float]]]) -> list[tuple[int, int]]:
        counts = [(place, self._children(r, i)) for place, (r, i) in enumerate(asked)]
        return [(place, count) for place, count in counts if count]

    def _then(self, row: int, draft: int) -> int:
        return -1 if draft < 0 else self._of[row].get(draft, -2)

    def _children(self, row: int, draft: int) -> int:
        """How many children a model drafted behind it then; one that could not be drawn counts as well."""
        kinds = [kind for kind, parent in self.shapes[row] if parent == self._then(row, draft) and kind != "c"]
        return len(kinds) + (len(kinds) > 0 and "d" not in kinds)

    def _behind(self, row: int, draft: int) -> bool:
        """Whether a model drafted anything further behind it."""
        below = {self._then(row, draft)}
        for then, (kind, parent) in enumerate(self.shapes[row]):
            if parent in below:
                if kind != "c" and parent != self._then(row, draft):
                    return True
                below.add(then)
        return False
