"""One queue for all workers: which race goes to which worker, and what those that wait can expect.

Contract: a free worker gets the waiting race with the least expected work, but nobody is overtaken for longer than
`patience_s`: a race that has waited that long comes first, in order of arrival. Of the free workers one that has
the race's pair is chosen. Thread-safe. `steps` counts a request's work in steps of one row; `Pace` turns steps
into seconds by what finished races took. Both are estimates that order the queue, and no figure of a race.
Non-goals: running races (cluster/); limits on how many wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from bass_core import DEFAULT_LANES, METHODS
from ui.page.request import RaceRequest

PATIENCE_S = 60.0
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


@dataclass(eq=False)
class Ticket:
    """A race in the queue. `worker` is None while it waits; `since` and `started` are the clock's seconds."""

    request: RaceRequest
    since: float
    worker: Hashable | None = None
    started: float = 0.0


class Queue:
    """Free workers and waiting races."""

    def __init__(self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []
        self._running: dict[Hashable, Ticket] = {}
        # The pairs that each free or busy worker has loaded.
        self._workers: dict[Hashable, set[str]] = {}
        self._pace = Pace()

    def add(self, worker: Hashable) -> None:
        """A worker is ready for its first race."""
        with self._changed:
            self._workers[worker] = {""}
            self._dispatch()

    def remove(self, worker: Hashable) -> None:
        """A worker is gone; its race, if any, ends by itself."""
        with self._changed:
            self._workers.pop(worker, None)
            self._running.pop(worker, None)

    def enter(self, request: RaceRequest, since: float | None = None) -> Ticket:
        """Queue a race; `since`, if it waited before and got a worker that was gone."""
        ticket = Ticket(request, self._clock() if since is None else since)
        with self._changed:
            self._waiting.append(ticket)
            self._dispatch()
        return ticket

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Whether the ticket has a worker now, or gets one within these seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: ticket.worker is not None, seconds)

    def holds(self, ticket: Ticket) -> bool:
        """Whether the ticket's worker is still its own: one that died meanwhile may be back, and another's."""
        with self._changed:
            return ticket.worker is not None and self._running.get(ticket.worker) is ticket

    def leave(self, ticket: Ticket, finished: bool = False) -> None:
        """The race gave up waiting, or its worker is free again; `finished` races show the pace."""
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if finished:
                self._pace.add(ticket.request, self._clock() - ticket.started)
            if ticket.worker is not None and self._running.get(ticket.worker) is ticket:
                del self._running[ticket.worker]
                self._dispatch()

    def outlook(self, ticket: Ticket) -> tuple[int, float | None]:
        """(place, seconds until the race is expected to start): place 1 is next, 0 has a worker."""
        with self._changed:
            if ticket not in self._waiting:
                return 0, 0.0
            order = self._order()
            place = order.index(ticket)
            # When each worker is free: one after another takes the next race of the queue.
            free = sorted(map(self._left_s, self._workers))
            if self._pace.seconds is None or not free:
                return place + 1, None
            for before in order[:place]:
                free[0] += self._pace.expected_s(before.request) or 0.0
                free.sort()
            return place + 1, free[0]

    def _left_s(self, worker: Hashable) -> float:
        """Seconds until the worker is expected to be free."""
        ticket = self._running.get(worker)
        if ticket is None:
            return 0.0
        expected = self._pace.expected_s(ticket.request) or 0.0
        return max(0.0, expected - (self._clock() - ticket.started))

    def _order(self) -> list[Ticket]:
        """Who comes next: the patient by arrival, then the others by their work."""
        due = self._clock() - self._patience_s
        patient = sorted((one for one in self._waiting if one.since <= due), key=lambda one: one.since)
        rest = [one for one in self._waiting if one.since > due]
        return patient + sorted(rest, key=lambda one: (self._work(one), one.since))

    def _work(self, ticket: Ticket) -> float:
        expected = self._pace.expected_s(ticket.request)
        return steps(ticket.request) if expected is None else expected

    def _dispatch(self) -> None:
        for ticket in self._order():
            free = [worker for worker in self._workers if worker not in self._running]
            if not free:
                break
            pair = ticket.request.pair
            worker = next((one for one in free if pair in self._workers[one]), free[0])
            if pair not in self._workers[worker]:
                # A worker keeps its own pair and the last other one (local.Models).
                self._workers[worker] = {"", pair}
            self._waiting.remove(ticket)
            ticket.worker, ticket.started = worker, self._clock()
            self._running[worker] = ticket
        self._changed.notify_all()
