"""What decides how far a round's trees of drafts grow, and the plainest of those who do.

Contract: a `Grower` is asked while the trees of all rows grow together, level by level (drafting/trees/growth.py).
It knows of a draft what stood before it was drawn, and its worth: the chance that the target accepts it together
with its path. A policy (policies.py) that is a Grower as well decides over trees where the drafter can grow them,
and over chains where not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import RequestError
from ..sequence import Bill
from .base import Feedback

# The most drafts of a row in a round: as many columns as a tree may take, but for the newest token's.
MOST_DRAFTS = 62
# What a copied draft's chance is taken for where nobody has counted.
COPY_CHANCE = 0.75


@dataclass
class Draft:
    """A draft in a tree that grows. parent: its index in the row, or -1; depth: 1 behind the newest token.

    kind: "likely" (among the draft's likeliest), "drawn" or "copied". raw: what its source says its chance is
    where its parent is accepted; for a drawn one, q's largest value there. worth: see the module's contract.
    children: for a sampled tree, how many were drafted behind it with the same q.
    """

    row: int
    token: int
    parent: int
    depth: int
    kind: str
    raw: float
    worth: float


class Grower(Protocol):
    """Whoever decides how trees grow. limit: the most tokens that a draft may stand behind the newest one."""

    limit: int

    @property
    def bill(self) -> Bill | None:
        """Of the last round; None where nothing is reckoned."""
        ...

    def chance(self, kind: str, depth: int, raw: float) -> float:
        """The chance that a draft is accepted where its parent is."""
        ...

    def any_chance(self, children: int, raw: float) -> float:
        """The chance that one of so many sampled children is accepted; raw: the largest value of their q."""
        ...

    def counts(
        self, fixed: Sequence[Sequence[float]], others: Sequence[Sequence[float]], levels: int
    ) -> list[int]:
        """How many of each row's other drafts to verify, the first ones, beside those that are fixed.

        Worths by row, descending. levels: forwards of the draft so far.
        """
        ...

    def deeper(self, worths: Sequence[float], open_: Sequence[float], rows: int, levels: int) -> bool:
        """Whether to ask the draft for one more level, with drafts of these worths in the trees already.

        open_: for each draft (or newest token) that it would be asked behind, the chance that it is accepted and
        none of the drafts that follow it already.
        """
        ...

    def offered(self, worths: Sequence[Sequence[float]]) -> None:
        """Told the worths of all drafts that a level offers, before some are chosen: behind each of open_."""
        ...

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        """Told what a round verifies, by row, before it does."""
        ...

    def observe_trees(self, feedback: Feedback) -> None:
        """Told what came of it."""
        ...


@dataclass
class FixedNodes:
    """So many drafts a round in all rows together, best first; chains of that length where nothing grows.

    levels: the most forwards of the draft. A draft's worth is what its source says, uncorrected.
    """

    nodes: int
    levels: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or not 0 <= self.nodes <= 1 << 20:
            raise RequestError(f"FixedNodes takes a whole number of drafts from 0 to 1048576; got {self.nodes!r}.")
        self.limit = min(self.nodes, MOST_DRAFTS)

    @property
    def grower(self) -> Grower:
        """Itself."""
        return self

    @property
    def bill(self) -> None:
        """Nothing is reckoned."""
        return None

    @property
    def length(self) -> int:
        """The length of chains."""
        return self.limit

    def update(self, accepted: list[int]) -> None:
        return None

    def chance(self, kind: str, depth: int, raw: float) -> float:
        return COPY_CHANCE if kind == "copied" else raw

    def any_chance(self, children: int, raw: float) -> float:
        return 1 - (1 - max(raw, 0.5)) ** children

    def counts(
        self, fixed: Sequence[Sequence[float]], others: Sequence[Sequence[float]], levels: int
    ) -> list[int]:
        return best(others, self.nodes - sum(map(len, fixed)))

    def deeper(self, worths: Sequence[float], open_: Sequence[float], rows: int, levels: int) -> bool:
        return levels < self.levels and self.nodes > 0

    def offered(self, worths: Sequence[Sequence[float]]) -> None:
        return None

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        return None

    def observe_trees(self, feedback: Feedback) -> None:
        return None


def best(worths: Sequence[Sequence[float]], take: int) -> list[int]:
    """How many of each row's worths, which descend, are among the `take` largest of all."""
    ranked = sorted((-worth, place, r) for r, row in enumerate(worths) for place, worth in enumerate(row))
    chosen = Counter(r for _, _, r in ranked[: max(take, 0)])
    return [chosen[r] for r in range(len(worths))]
