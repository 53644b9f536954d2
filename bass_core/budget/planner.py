"""The planner: which drafts of which rows are worth their place in a round, by measured cost.

Contract: a Grower (trees.py) for drafters that can grow trees, and for the others the cost-aware chain. Each draft
has a worth, the chance that it is accepted with its path, so a round should write rows + the sum of its drafts'
worths. The planner takes the drafts, best first over all rows, that make expected tokens a millisecond the most,
and asks the draft for one more level only where that should pay. Chances are counted while the text is written, by
the kind of draft and what its source said; costs come from a table measured on this machine. Given the table it is
a function of what was drafted and accepted, so a run repeats. It looks at the rows that are left alone: the last
rows of a batch have the step to themselves. Source: goodput, vLLM's adaptive verification (#47808), and DSpark
(arXiv 2607.05147), here with trees and an exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, zip_longest

from ..sequence import Bill
from .base import Feedback
from .chances import Chances
from .cost_aware import CostAware
from .cost_table import RoundCosts
from .levels import Levels
from .trees import Draft, best

# The most drafts that a round verifies: so many, or so many a row; prices that a bill lists behind those verified.
MOST, MOST_A_ROW, MORE_PRICES = 96, 8, 4
# Costs that are kept: each is asked for again and again.
_KEPT = 4096


class Planner(CostAware):
    """`table`: costs of rounds. `sampled`: of a text that is sampled, neither greedy nor coupled.

    The bill of the last round that it planned is `bill`.
    """

    def __init__(self, table: RoundCosts, rows: int = 1, sampled: bool = False) -> None:
        super().__init__(table, rows)
        self.bill: Bill | None = None
        self._chances, self._levels = Chances(sampled), Levels(sampled)
        self._drafts: list[list[Draft]] = []
        self._step_ms = lru_cache(_KEPT)(table.verify_ms)

    @property
    def grower(self) -> Planner:
        """Itself."""
        return self

    def chance(self, kind: str, depth: int, raw: float) -> float:
        """See Grower: what was counted for drafts of this kind of which as much was said."""
        return self._chances.of(kind, depth, raw)

    def any_chance(self, children: int, raw: float) -> float:
        """See Grower."""
        return self._chances.of_any(children, raw)

    def counts(
        self, fixed: Sequence[Sequence[float]], others: Sequence[Sequence[float]], levels: int
    ) -> list[int]:
        """See Grower: as many as make tokens a millisecond the most.

        Where padding costs what tokens cost, all rows get as many: up to the widest row a draft is free.
        """
        if self.table.padded:
            columns = zip_longest(*([*kept, *row] for kept, row in zip(fixed, others, strict=True)), fillvalue=0.0)
            width = self._count([sum(column) for column in columns], max(map(len, fixed)), len(fixed), levels)
            return [min(max(width - len(kept), 0), len(row)) for kept, row in zip(fixed, others, strict=True)]
        kept = [worth for row in fixed for worth in row]
        rest = sorted((worth for row in others for worth in row), reverse=True)
        return best(others, self._count([*kept, *rest], len(kept), len(fixed), levels) - len(kept))

    def _count(self, worths: list[float], fixed: int, rows: int, levels: int) -> int:
        """How many of these to verify, `fixed` at least; each is one draft, or one a row where padding costs."""
        each = rows if self.table.padded else 1
        tokens = list(accumulate(worths, initial=float(rows)))
        most = max(fixed, min(len(worths), max(MOST, MOST_A_ROW * rows) // each))
        drafting = self.table.levels_ms(rows, levels)
        return max(
            range(fixed, most + 1),
            key=lambda count: tokens[count] / (self._step_ms(rows, rows + each * count) + drafting),
        )

    def deeper(self, worths: Sequence[float], open_: Sequence[float], rows: int, levels: int) -> bool:
        """See Grower: whether tokens a millisecond should grow; now and then tried where they should not."""
        if levels >= self.limit:
            return False
        total = rows + sum(worths)
        return self._levels.pays(
            levels, open_, total, len(worths), lambda asked, drafts: self._round_ms(rows, drafts, asked)
        )

    def offered(self, worths: Sequence[Sequence[float]]) -> None:
        """See Grower."""
        self._levels.found(worths)

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        """See Grower; makes the bill."""
        worths = sorted((draft.worth for row in drafts for draft in row), reverse=True)
        self._drafts, self.rows = drafts, len(drafts)
        self.bill = self._make_bill(worths, len(drafts), levels)

    def observe_trees(self, feedback: Feedback) -> None:
        """See Grower: counts each draft whose parent stood."""
        self._chances.observe(self._drafts, feedback)

    def _round_ms(self, rows: int, drafts: float, levels: int) -> float:
        return self._step_ms(rows, rows + drafts) + self.table.levels_ms(rows, levels)

    def _make_bill(self, worths: list[float], rows: int, levels: int) -> Bill:
        drafts, expected = len(worths), rows + sum(worths)
        rate = expected / self._round_ms(rows, drafts, levels)
        shown = range(drafts + MORE_PRICES)
        ms = [self._step_ms(rows, rows + count) for count in range(drafts + MORE_PRICES + 1)]
        return Bill(
            curve=[(rows + count, one) for count, one in enumerate(ms)],
            tokens=rows + drafts,
            levels=levels,
            draft_ms=self.table.levels_ms(rows, levels),
            worths=worths,
            prices=[rate * (ms[count + 1] - ms[count]) for count in shown],
            expected=expected,
            plain_ms=ms[0],
        )
