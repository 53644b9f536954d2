"""What a planner believes of drafts: how often they are accepted.

Contract: first guesses, each corrected by what is counted while the text is written. The guesses are
rounded from what the shipped draft head's drafts came to; `python -m bench chances` counts them. No clock enters,
so a run repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Feedback
from .trees import COPY_CHANCE, Draft

# The weight of what was counted, after each further round.
FADE = 0.99
# A chance counts as if tried so many times at its first guess, a copied draft's as if so often.
PRIOR, COPY_PRIOR = 6.0, 3.0
# A sampled text accepts a likely draft this many times as often as q says.
_SAMPLED_LIKELY = 0.75


@dataclass
class Share:
    """How often something came true, with a first guess."""

    yes: float = 0.0
    tried: float = 0.0

    def add(self, came: float) -> None:
        self.yes, self.tried = self.yes * FADE + came, self.tried * FADE + 1

    def guess(self, first: float, weight: float = PRIOR) -> float:
        """The share, as if tried `weight` times before, at the first guess."""
        return (self.yes + weight * first) / (self.tried + weight)


class Chances:
    """How often drafts are accepted, by kind and by what their source says. sampled: of a text that is sampled."""

    def __init__(self, sampled: bool = False) -> None:
        self._likely = _SAMPLED_LIKELY if sampled else 1.0
        self._shares: dict[tuple[str, int, int], Share] = {}

    def of(self, kind: str, depth: int, raw: float) -> float:
        """The chance that a draft of this kind is accepted where its parent is (Grower.chance)."""
        if kind == "copied":
            first = COPY_CHANCE if depth == 1 else (1 + COPY_CHANCE) / 2
            return self._share(kind, depth, raw).guess(first, COPY_PRIOR)
        return self._share(kind, depth, raw).guess(self._likely * raw)

    def of_any(self, children: int, raw: float) -> float:
        """The chance that one of so many sampled children is accepted (Grower.any_chance)."""
        first = 1 - (1 - (0.2 + 0.6 * raw)) ** (1 + 0.2 * (children - 1))
        return self._share("any", children, raw).guess(first)

    def observe(self, drafts: list[list[Draft]], feedback: Feedback) -> None:
        """Count each draft whose parent stood; sampled siblings together, by what was known before the draw."""
        for row, path in zip(drafts, feedback.paths or [], strict=True):
            stood = {-1, *path}
            families: dict[int, list[int]] = {}
            for i, draft in enumerate(row):
                if draft.parent not in stood:
                    continue
                if draft.kind != "copied":
                    families.setdefault(draft.parent, []).append(i)
                if draft.kind != "drawn":
                    self._share(draft.kind, draft.depth, draft.raw).add(i in stood)
            for family in families.values():
                drawn = [row[i] for i in family if row[i].kind == "drawn"]
                if drawn:
                    came = any(i in stood for i in family)
                    self._share("any", len(family), drawn[0].raw).add(came)

    def _share(self, kind: str, place: int, raw: float) -> Share:
        deepest, said = (8, 0) if kind == "copied" else (3, _bin(raw))
        return self._shares.setdefault((kind, min(place, deepest), said), Share())


def _bin(raw: float) -> int:
    """Tenths, and finer ones where the draft is nearly sure."""
    return int(10 * raw) if raw < 0.9 else 9 + int(50 * (raw - 0.9))
