"""When draft and target were busy, and when the draft rolled back, to show how far they overlap.

Times come in as time.perf_counter and are stored as milliseconds of the lane's own time, which passes only inside
`slice()`. Totals count everything; the lists keep the newest LIMIT entries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LIMIT = 400
# Steps of the draft less than this many milliseconds apart are shown as one.
GAP_MS = 0.5


def _recent() -> deque[Any]:
    return deque(maxlen=LIMIT)


@dataclass
class Timeline:
    """The busy times of draft and target.

    Attributes:
        waited_ms: time that the target waited for drafts.
        made: tokens drafted.
        looked_at: drafted tokens that a verification has judged.
        waiting: drafted tokens not verified yet.
        note: why the lane continues without a draft; None while it has one.
    """

    target: deque[list[float]] = field(default_factory=_recent)
    draft: deque[list[float]] = field(default_factory=_recent)
    rollbacks: deque[float] = field(default_factory=_recent)
    target_ms: float = 0.0
    draft_ms: float = 0.0
    waited_ms: float = 0.0
    rolled_back: int = 0
    made: int = 0
    looked_at: int = 0
    waiting: int = 0
    note: str | None = None
    _passed: float = 0.0
    _since: float = 0.0

    @property
    def thrown_away(self) -> int:
        """Number of drafted tokens that were dropped before any verification judged them."""
        # Under synthetic acceptance, two verifications can judge the same draft, so the difference may be
        # negative.
        return max(0, self.made - self.looked_at - self.waiting)

    @contextmanager
    def slice(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._passed, self._since = self._passed + 1000 * (now - self._since), now

    def lane_ms(self, at: float) -> float:
        """Convert a time.perf_counter time to the lane's clock; a time before this slice becomes its beginning."""
        return self._passed + 1000 * max(0.0, at - self._since)

    def add_target(self, begin: float, end: float) -> None:
        span = [self.lane_ms(begin), self.lane_ms(end)]
        self.target.append(span)
        self.target_ms += span[1] - span[0]

    def add_draft(self, begin: float, end: float) -> None:
        """Record that the draft worked from `begin` to `end`; joins steps that are close together."""
        span = [self.lane_ms(begin), self.lane_ms(end)]
        self.draft_ms += span[1] - span[0]
        if self.draft and span[0] - self.draft[-1][1] < GAP_MS:
            self.draft[-1][1] = max(span[1], self.draft[-1][1])
        else:
            self.draft.append(span)

    def add_rollback(self, at: float) -> None:
        """Record that the draft dropped tokens because the text went on differently."""
        self.rolled_back += 1
        self.rollbacks.append(self.lane_ms(at))

    def view(self) -> dict[str, Any]:
        """Return the timeline as JSON-ready data."""
        return {
            "target": [[round(a, 2), round(b, 2)] for a, b in self.target],
            "draft": [[round(a, 2), round(b, 2)] for a, b in self.draft],
            "rollbacks": [round(at, 2) for at in self.rollbacks],
            "target_busy_ms": round(self.target_ms, 2),
            "draft_busy_ms": round(self.draft_ms, 2),
            "rolled_back": self.rolled_back,
            "drafted": self.made,
            "thrown_away": self.thrown_away,
            "note": self.note,
        }
