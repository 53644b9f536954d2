"""How much work a race is, before it runs, and how long that will take.

Contract: `steps` counts a request's work in steps of one row; `Pace` turns steps into seconds by what finished
races took, and knows nothing before the first one. Both are estimates that order a queue, and no figure of a race.
"""

from __future__ import annotations

from bass_core import DEFAULT_LANES, METHODS
from ui.page.request import RaceRequest

# A step of a row more costs about a tenth of a step of one row: README, "When which decoder wins", batch 1 to 16.
ROW = 0.1
# Characters of a prompt that cost about a step: some four a token, and ten tokens a step of a prefill.
CHARACTERS = 40
# How much the newest race counts in the pace.
NEWEST = 0.3


def steps(request: RaceRequest) -> float:
    """The race's work; a lane without batching decodes its rows one after another."""
    total = 0.0
    for name in request.lanes or DEFAULT_LANES:
        method = METHODS.get(name)
        batched = method is None or method.batched
        rows = 1 + ROW * (request.batch_size - 1) if batched else request.batch_size
        total += request.max_new_tokens * rows + len(request.prompt) / CHARACTERS
    return total


class Pace:
    """Seconds a step, as a running mean over finished races; not thread-safe."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, request: RaceRequest, seconds: float) -> None:
        """A race has finished. One with a time budget says nothing of the pace."""
        if request.time_budget_ms is not None:
            return
        one = seconds / steps(request)
        self.seconds = one if self.seconds is None else (1 - NEWEST) * self.seconds + NEWEST * one

    def expected_s(self, request: RaceRequest) -> float | None:
        """Seconds that the race is expected to take; None if no race has finished yet."""
        if self.seconds is None:
            return None
        expected, budget = self.seconds * steps(request), request.time_budget_ms
        return expected if budget is None else min(expected, len(request.lanes or DEFAULT_LANES) * budget / 1000)
