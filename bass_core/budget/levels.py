"""What a planner believes of one more level of trees: which drafts it offers, and whether to ask for it.

Contract: as in chances.py: first guesses, corrected by what is counted; no clock enters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .chances import FADE

# Rounds until a level that should not pay is tried; the wait doubles, up to the longest, while it does not.
FIRST_WAIT, LONGEST_WAIT = 32, 128
# How much faster a round should be with a level: the table leaves out that the draft catches up with the text.
_LEAST_GAIN = 1.03
# Levels that are counted apart; their first guesses count as if this much had been open.
_LEVELS, _OPEN = 4, 6.0
# How many drafts a level offers behind one that is open, by their chance there: the middles of tenths from 0.1 on.
_TENTHS = tuple(0.15 + 0.1 * tenth for tenth in range(9))
_OFFERED = (0.66, 0.24, 0.17, 0.11, 0.07, 0.08, 0.06, 0.06, 0.10)
_OFFERED_SAMPLED = (0.0, 0.05, 0.15, 0.19, 0.17, 0.15, 0.29, 0.0, 0.0)


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
    # Of a level that was asked for: its number, what was open, and the mean of that.
    _asked: tuple[int, float, float] | None = None

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
        known, left = self._level(level), sum(open_)
        mean = left / max(len(open_), 1)
        now = total / ms(level, drafts)
        then = self._rate(known, left, mean, total, drafts, lambda more: ms(level + 1, more))
        pays = then > _LEAST_GAIN * now
        known.skipped = 0 if pays else known.skipped + 1
        if pays:
            known.wait = FIRST_WAIT
        elif known.skipped >= known.wait:
            pays, known.skipped, known.wait = True, 0, min(2 * known.wait, LONGEST_WAIT)
        self._asked = (level, left, mean) if pays else None
        return pays

    def found(self, worths: Sequence[float]) -> None:
        """Note the worths of all drafts that the level that was asked for offers."""
        if self._asked is None:
            return
        level, left, mean = self._asked
        self._asked, known = None, self._level(level)
        if left <= 0:
            return
        known.offered, known.open = [FADE * share for share in known.offered], FADE * known.open + left
        for worth in worths:
            tenth = int(10 * worth / mean) - 1
            if tenth >= 0:
                known.offered[min(tenth, len(_TENTHS) - 1)] += mean

    def _rate(
        self,
        known: _Level,
        left: float,
        mean: float,
        total: float,
        drafts: float,
        ms: Callable[[float], float],
    ) -> float:
        """Tokens a ms with the level, if the best of what it should offer are verified."""
        best = total / ms(drafts)
        for offered, tenth in zip(reversed(known.offered), reversed(_TENTHS), strict=True):
            count = offered / known.open * left / max(mean, 1e-6)
            total, drafts = total + count * tenth * mean, drafts + count
            best = max(best, total / ms(drafts))
        return best

    def _level(self, level: int) -> _Level:
        return self._known[min(level, _LEVELS - 1)]
