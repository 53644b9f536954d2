"""What a planner believes of one more level of trees: which drafts it offers, and whether to ask for it.

Contract: as in chances.py: first guesses, corrected by what is counted; no clock enters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .chances import FADE

# Rounds until a level that should not pay is tried; the wait doubles, up to the longest, while it does not.
FIRST_WAIT, LONGEST_WAIT = 64, 256
# How much faster a round should be with its first level: the table leaves out that the draft reads what was
# written since it was asked last. Of a further level its price is all, and another one may follow it.
_LEAST_GAIN = 1.03
# Levels that are counted apart; their first guesses count as if this much had been open.
_LEVELS, _OPEN = 4, 6.0
# How many drafts a level offers behind one that is open, by their chance there: the middles of tenths from 0.1 on.
_TENTHS = tuple(0.15 + 0.1 * tenth for tenth in range(9))
_OFFERED = (0.66, 0.24, 0.17, 0.11, 0.07, 0.08, 0.06, 0.06, 0.10)
_OFFERED_SAMPLED = (0.0, 0.05, 0.15, 0.19, 0.17, 0.15, 0.29, 0.0, 0.0)
# Numbers of further drafts for which a round with one more level is reckoned.
_FURTHER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


@dataclass
class _Level:
    """Drafts offered, by tenth, for what was open; and how long it was not asked for."""

    offered: list[float]
    open: float = _OPEN
    skipped: int = 0
    wait: int = FIRST_WAIT


@dataclass
class Levels:
    """What one more level of trees offers, and whether to ask for it. sampled: as in Chances."""

    sampled: bool = False
    _known: list[_Level] = field(init=False)
    # Of a level that was asked for: its number, and what was open.
    _asked: tuple[int, list[float]] | None = None

    def __post_init__(self) -> None:
        first = _OFFERED_SAMPLED if self.sampled else _OFFERED
        self._known = [_Level([_OPEN * share for share in first]) for _ in range(_LEVELS)]

    def pays(
        self, level: int, open_: Sequence[float], total: float, drafts: int, ms: Callable[[int, float], float]
    ) -> bool:
        """Whether to ask for this level: if tokens a millisecond should grow, and now and then where not.

        open_: as in Grower.deeper. total: tokens that the round should write as it stands, with so many drafts.
        ms(levels, drafts): what a round takes.
        """
        known = self._level(level)
        then = max(
            (total + gained) / ms(level + 1, drafts + more) for more, gained in self._expected(known, open_)
        )
        pays = then > (1.0 if level else _LEAST_GAIN) * total / ms(level, drafts)
        known.skipped = 0 if pays else known.skipped + 1
        if pays:
            known.wait = FIRST_WAIT
        elif known.skipped >= known.wait:
            pays, known.skipped, known.wait = True, 0, min(2 * known.wait, LONGEST_WAIT)
        self._asked = (level, list(open_)) if pays else None
        return pays

    def found(self, worths: Sequence[Sequence[float]]) -> None:
        """Note the worths of all drafts that the level that was asked for offers, as Grower.offered has them.

        A draft counts by how much was open before it, so that likely ones weigh more.
        """
        if self._asked is None:
            return
        (level, open_), self._asked = self._asked, None
        known = self._level(level)
        known.offered, known.open = [FADE * share for share in known.offered], FADE * known.open + sum(open_)
        for before, behind in zip(open_, worths, strict=True):
            for worth in behind:
                tenth = int(10 * worth / before) - 1 if before > 0 else -1
                if tenth >= 0:
                    known.offered[min(tenth, len(_TENTHS) - 1)] += before

    def _expected(self, known: _Level, open_: Sequence[float]) -> list[tuple[float, float]]:
        """For numbers of further drafts, the best ones of those that the level should offer, the sum of worths."""
        worths = np.outer(open_, _TENTHS).ravel()
        order = np.argsort(-worths)
        counts = np.tile(np.array(known.offered) / known.open, len(open_))[order]
        drafts, gained = counts.cumsum(), (counts * worths[order]).cumsum()
        behind = np.searchsorted(drafts, _FURTHER)
        places = np.unique(np.clip((behind - 1, behind), 0, len(order) - 1))
        return list(zip(drafts[places].tolist(), gained[places].tolist(), strict=True))

    def _level(self, level: int) -> _Level:
        return self._known[min(level, _LEVELS - 1)]
