"""One queue for all workers: assigns races to workers, and predicts when a waiting race starts. See `Queue`.

- A free worker gets the waiting race with the least expected work. A race that has waited for `patience_s` seconds
  comes first, in order of arrival.
- Among free workers, one that has the race's pair loaded is preferred.
- `steps` estimates a race's work in steps of one row, and `WaitEstimate` converts steps to seconds from finished
  races. Both are used only to order the queue and to predict waiting times, never for a race's figures.
- `Queue` is thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from bass_core import DEFAULT_LANES, METHODS
from ui.page.request import RaceRequest

PATIENCE_S = 60.0
# Each further row makes a step about a tenth longer (on a CPU without AMX,
# bench/results/floor-without-amx.json).
ROW_COST = 0.1
# Prompt characters that cost about as much as one step: four characters per token, ten prefill tokens per step.
CHARACTERS_PER_STEP = 40
# Weight of the newest race in the running mean of the pace.
NEWEST_WEIGHT = 0.3


def steps(request: RaceRequest) -> float:
    """Return the race's work in steps of one row. A lane without batching decodes its rows one after the other."""
    total = 0.0
    for name in request.lanes or DEFAULT_LANES:
        method = METHODS.get(name)
        batched = method is None or method.batched
        rows = 1 + ROW_COST * (request.batch_size - 1) if batched else request.batch_size
        total += request.max_new_tokens * rows + len(request.prompt) / CHARACTERS_PER_STEP
    return total


class WaitEstimate:
    """Seconds per step, as a running mean over finished races. Not thread-safe."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, request: RaceRequest, seconds: float) -> None:
        """Add a finished race. Ignore a race with a time budget, because it may have stopped early."""
        if request.time_budget_ms is not None:
            return
        newest = seconds / steps(request)
        self.seconds = (
            newest if self.seconds is None else (1 - NEWEST_WEIGHT) * self.seconds + NEWEST_WEIGHT * newest
        )

    def expected_s(self, request: RaceRequest) -> float | None:
        """Return the expected seconds of a race, or None if no race has finished yet."""
        if self.seconds is None:
            return None
        expected, budget = self.seconds * steps(request), request.time_budget_ms
        return expected if budget is None else min(expected, len(request.lanes or DEFAULT_LANES) * budget / 1000)


@dataclass(eq=False)
class Ticket:
    """A race in the queue.

    Attributes:
        since: when it began to wait, in seconds of the queue's clock.
        worker: its worker, or None while it waits.
    """

    request: RaceRequest
    since: float
    worker: Hashable | None = None
    started: float = 0.0


class Queue:
    """Free workers and waiting races. Nobody overtakes a race that has waited for `patience_s` seconds."""

    def __init__(self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []
        self._running: dict[Hashable, Ticket] = {}
        # All workers, free or busy, with the pairs that each has loaded.
        self._workers: dict[Hashable, set[str]] = {}
        self._pace = WaitEstimate()

    def add(self, worker: Hashable) -> None:
        """Add a worker that is ready for its first race."""
        with self._changed:
            self._workers[worker] = {""}
            self._dispatch()

    def remove(self, worker: Hashable) -> None:
        """Remove a worker that is gone. If it had a race, that race ends by itself."""
        with self._changed:
            self._workers.pop(worker, None)
            self._running.pop(worker, None)

    def enter(self, request: RaceRequest, since: float | None = None) -> Ticket:
        """Queue a race. If its worker turned out to be gone, pass its `since`, so that it keeps its place."""
        ticket = Ticket(request, self._clock() if since is None else since)
        with self._changed:
            self._waiting.append(ticket)
            self._dispatch()
        return ticket

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Return whether the ticket has a worker now or gets one within these seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: ticket.worker is not None, seconds)

    def holds(self, ticket: Ticket) -> bool:
        """Return whether the ticket still has its worker. A worker that died may already serve another race."""
        with self._changed:
            return ticket.worker is not None and self._running.get(ticket.worker) is ticket

    def leave(self, ticket: Ticket, finished: bool = False) -> None:
        """End a ticket: the race gave up waiting, or its worker is free again.

        Args:
            finished: whether the race ran to its end, so that it counts for the pace.
        """
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if finished:
                self._pace.add(ticket.request, self._clock() - ticket.started)
            if ticket.worker is not None and self._running.get(ticket.worker) is ticket:
                del self._running[ticket.worker]
                self._dispatch()

    def outlook(self, ticket: Ticket) -> tuple[int, float | None]:
        """Return (place, expected seconds until the race starts). Place 1 is next, place 0 has a worker."""
        with self._changed:
            if ticket not in self._waiting:
                return 0, 0.0
            order = self._order()
            place = order.index(ticket)
            # Seconds until each worker is free. Each race before this one goes to the worker that is free first.
            free = sorted(map(self._left_s, self._workers))
            if self._pace.seconds is None or not free:
                return place + 1, None
            for before in order[:place]:
                free[0] += self._pace.expected_s(before.request) or 0.0
                free.sort()
            return place + 1, free[0]

    def _left_s(self, worker: Hashable) -> float:
        """Return the expected seconds until the worker is free."""
        ticket = self._running.get(worker)
        if ticket is None:
            return 0.0
        expected = self._pace.expected_s(ticket.request) or 0.0
        return max(0.0, expected - (self._clock() - ticket.started))

    def _order(self) -> list[Ticket]:
        """Return the waiting tickets: the overdue ones in order of arrival, then the others by their work."""
        due = self._clock() - self._patience_s
        overdue = sorted(
            (ticket for ticket in self._waiting if ticket.since <= due), key=lambda ticket: ticket.since
        )
        rest = [ticket for ticket in self._waiting if ticket.since > due]
        return overdue + sorted(rest, key=lambda ticket: (self._work(ticket), ticket.since))

    def _work(self, ticket: Ticket) -> float:
        expected = self._pace.expected_s(ticket.request)
        return steps(ticket.request) if expected is None else expected

    def _dispatch(self) -> None:
        for ticket in self._order():
            free = [worker for worker in self._workers if worker not in self._running]
            if not free:
                break
            pair = ticket.request.pair
            worker = next((known for known in free if pair in self._workers[known]), free[0])
            if pair not in self._workers[worker]:
                # A worker keeps its own pair and the last other one (local.Models).
                self._workers[worker] = {"", pair}
            self._waiting.remove(ticket)
            ticket.worker, ticket.started = worker, self._clock()
            self._running[worker] = ticket
        self._changed.notify_all()
