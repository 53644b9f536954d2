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
from dataclasses import dataclass, field
from itertools import accumulate

from ..sequence import Bill
from .base import Feedback
from .cost_aware import FIRST_WAIT, LONGEST_WAIT, CostAware
from .cost_table import RoundCosts
from .trees import COPY_CHANCE, Draft

# The weight of what was counted, after each further round.
FADE = 0.99
# A chance counts as if tried so many times at what its source says.
PRIOR = 6.0
# The most drafts that a round verifies: so many, or so many a row; prices that a bill lists behind those verified.
MOST, MOST_A_ROW, MORE_PRICES = 96, 8, 4
# Where padding costs what tokens cost: what a draft's place is taken for at first, in tokens.
_PADDED = 1.5
# Levels of which the gain is learnt apart, and what it is taken for at first: of the newest tokens, of drafts.
_LEVELS, _FIRST_GAIN, _GAIN = 6, 0.7, 0.45


@dataclass
class _Share:
    """How often something came true, with a first guess."""

    yes: float = 0.0
    tried: float = 0.0

    def add(self, came: float, weight: float = 1.0) -> None:
        self.yes, self.tried = self.yes * FADE + came * weight, self.tried * FADE + weight

    def guess(self, prior: float, weight: float = PRIOR) -> float:
        return (self.yes + weight * prior) / (self.tried + weight)


@dataclass
class _Level:
    """What asking the draft for a level brought: worth and drafts, for each unit of what was open before it."""

    worth: _Share = field(default_factory=_Share)
    drafts: _Share = field(default_factory=_Share)
    skipped: int = 0
    wait: int = FIRST_WAIT


class Planner(CostAware):
    """`table`: costs of rounds. The bill of the last round that it planned is `bill`."""

    def __init__(self, table: RoundCosts, rows: int = 1) -> None:
        super().__init__(table, rows)
        self.bill: Bill | None = None
        self._shares: dict[tuple[str, int, int], _Share] = {}
        self._levels = [_Level() for _ in range(_LEVELS)]
        self._padding = _Share()
        self._asked: tuple[int, float, float, int] | None = None
        self._drafts: list[list[Draft]] = []

    @property
    def grower(self) -> Planner:
        """Itself."""
        return self

    def chance(self, kind: str, depth: int, raw: float) -> float:
        """See Grower: what was counted for drafts of this kind of which as much was said."""
        if kind == "copied":
            prior = COPY_CHANCE if depth == 1 else (1 + COPY_CHANCE) / 2
            return self._share("copied", min(depth, 8), 0).guess(prior, 3.0)
        return self._share(kind, min(depth, 3), _bin(raw)).guess(raw)

    def any_chance(self, children: int, raw: float) -> float:
        """See Grower."""
        prior = 1 - (1 - max(raw, 0.4)) ** (1 + 0.5 * (children - 1))
        return self._share("any", children, _bin(raw)).guess(prior)

    def count(self, worths: Sequence[float], fixed: int, rows: int, levels: int) -> int:
        """See Grower: as many as make tokens a millisecond the most."""
        tokens = list(accumulate(worths, initial=float(rows)))
        most = max(fixed, min(len(worths), max(MOST, MOST_A_ROW * rows)))
        return max(range(fixed, most + 1), key=lambda count: tokens[count] / self._round_ms(rows, count, levels))

    def deeper(self, worths: Sequence[float], open_: Sequence[float], rows: int, levels: int) -> bool:
        """See Grower: whether tokens a millisecond should grow; now and then tried where they should not."""
        self._learn(worths, levels)
        if levels >= self.limit:
            return False
        level, drafts, total, left = self._level(levels), len(worths), rows + sum(worths), sum(open_)
        brings = left * level.worth.guess(_FIRST_GAIN if levels == 0 else _GAIN)
        more = left * level.drafts.guess(1.0)
        now = total / self._round_ms(rows, drafts, levels)
        then = (total + brings) / self._round_ms(rows, drafts + more, levels + 1)
        pays = then > now
        if pays:
            level.wait = FIRST_WAIT
        else:
            level.skipped += 1
            pays = level.skipped >= level.wait
            level.wait = min(2 * level.wait, LONGEST_WAIT) if pays else level.wait
        if pays:
            level.skipped = 0
            self._asked = levels, sum(worths), left, drafts
        return pays

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        """See Grower; makes the bill."""
        worths = sorted((draft.worth for row in drafts for draft in row), reverse=True)
        self._learn(worths, levels)
        self._asked, self._drafts, self.rows = None, drafts, len(drafts)
        if worths:
            self._padding.add(len(drafts) * max(map(len, drafts)) / len(worths))
        self.bill = self._make_bill(worths, len(drafts), levels)

    def observe_trees(self, feedback: Feedback) -> None:
        """See Grower: counts each draft whose parent stood."""
        for row, path in zip(self._drafts, feedback.paths or [], strict=True):
            stood = {-1, *path}
            families: dict[int, list[int]] = {}
            for i, draft in enumerate(row):
                if draft.parent not in stood:
                    continue
                if draft.kind != "copied":
                    families.setdefault(draft.parent, []).append(i)
                if draft.kind != "drawn":
                    at = (
                        (min(draft.depth, 8), 0)
                        if draft.kind == "copied"
                        else (min(draft.depth, 3), _bin(draft.raw))
                    )
                    self._share(draft.kind, *at).add(i in stood)
            for family in families.values():
                drawn = [row[i] for i in family if row[i].kind == "drawn"]
                if drawn:
                    came = any(i in stood for i in family)
                    self._share("any", len(family), _bin(drawn[0].raw)).add(came)

    def _learn(self, worths: Sequence[float], levels: int) -> None:
        """Note what the level brought that was asked for last."""
        if self._asked is None or self._asked[0] + 1 != levels:
            return
        level, before, left, drafts = self._asked
        if left > 0:
            self._level(level).worth.add(max(sum(worths) - before, 0.0), left)
            self._level(level).drafts.add(max(len(worths) - drafts, 0), left)
        self._asked = None

    def _level(self, levels: int) -> _Level:
        return self._levels[min(levels, _LEVELS - 1)]

    def _share(self, kind: str, place: int, said: int) -> _Share:
        return self._shares.setdefault((kind, place, said), _Share())

    def _round_ms(self, rows: int, drafts: float, levels: int) -> float:
        return self._verify_ms(rows, drafts) + self.table.levels_ms(rows, levels)

    def _verify_ms(self, rows: int, drafts: float) -> float:
        """One verification of so many drafts of all rows; where padding costs, of as much padding as was usual."""
        wide = self._padding.guess(_PADDED) if self.table.padded else 1.0
        return self.table.verify_ms(rows, rows + wide * drafts)

    def _make_bill(self, worths: list[float], rows: int, levels: int) -> Bill:
        drafts, expected = len(worths), rows + sum(worths)
        rate = expected / self._round_ms(rows, drafts, levels)
        shown = range(drafts + MORE_PRICES)
        ms = [self._verify_ms(rows, count) for count in range(drafts + MORE_PRICES + 1)]
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


def _bin(raw: float) -> int:
    """Tenths, and finer ones where the draft is nearly sure."""
    return int(10 * raw) if raw < 0.9 else 9 + int(50 * (raw - 0.9))
