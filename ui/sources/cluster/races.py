"""A Source on Ray's workers.

Contract: a race waits in the queue, then its deltas come from one worker, at most two ahead of their reader.
Closing it, on whatever path, reaches the worker within one round, and the worker is free once its race has ended;
one that has not ended after ENDING_S is started anew. While nothing comes, what came last is yielded again now and
then, so that Stop, a closed tab and the time limit are noticed. A worker that dies raises WorkerLost; a race that
it has not begun goes to another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.request import RaceRequest
from ui.sources.cluster.pool import Member, Pool
from ui.sources.cluster.start import Closed
from ui.sources.delta import Decoder
from ui.sources.queue import Ticket
from ui.sources.source import NOTHING, WorkerLost, waiting

# Snapshots that a worker may be ahead of their reader.
AHEAD = 2
# Seconds: how often a waiting race hears its place in the queue, and how long a running one may be silent.
TELL_S, SILENCE_S = 1.0, 5.0
# Seconds that a worker has to end a stopped race: many rounds of the slowest model.
ENDING_S = 120.0
# What torch raises once a device's context is lost; a lane's message names it.
BROKEN = "AcceleratorError"
# Seconds in which a free worker must answer.
ANSWER_S = 30.0
# Seconds until a prompt's length counts as not to be had.
COUNT_S = 10.0
LOST = (
    "The worker that ran this race has stopped, and what it had written is kept above: press Run to race again. "
    "The other workers go on, and this one is being started anew."
)


class Races:
    """The pool's workers as one Source."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._calls = pool, pool.calls

    def source(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """The race's snapshots."""
        since: float | None = None
        while True:
            ticket = self._pool.queue.enter(request, since)
            since = ticket.since
            yield from self._wait(ticket)
            if (yield from self._answers(ticket)):
                break
            self._pool.queue.leave(ticket)
        yield from self._run(ticket)

    def count(self, prompt: str, by_line: bool = False) -> str:
        """See Count; nothing while no worker is ready."""
        for member in self._pool.ready():
            with suppress(self._calls.errors.RayError, TimeoutError, Closed):
                return str(self._calls.get(self._calls.do(member.ask, "count", prompt, by_line), COUNT_S))
        return NOTHING

    def _wait(self, ticket: Ticket) -> Generator[Snapshot, None, None]:
        """Until the ticket has a worker."""
        queue = self._pool.queue
        try:
            while not queue.wait(ticket, TELL_S):
                if problem := self._pool.problem():
                    raise BassError(problem)
                yield waiting(*queue.outlook(ticket))
        except BaseException:
            queue.leave(ticket)
            raise

    def _answers(self, ticket: Ticket) -> Generator[Snapshot, None, bool]:
        """Whether the ticket's worker is there: one that died a moment ago may still count as free."""
        queue, member = self._pool.queue, ticket.worker
        assert isinstance(member, Member)
        life, end = member.life, time.monotonic() + ANSWER_S
        try:
            reference = self._calls.do(member.ask, "load")
            while not self._calls.ready(reference, TELL_S):
                if time.monotonic() >= end:
                    self._pool.restart(member)
                    self._pool.lost(member, life)
                    return False
                yield waiting(0, 0.0)
            self._calls.get(reference)
            return queue.holds(ticket)
        except self._calls.errors.RayError:
            # Its thread in the pool makes it ready again.
            self._pool.lost(member, life)
            return False
        except BaseException:
            queue.leave(ticket)
            raise

    def _run(self, ticket: Ticket) -> Generator[Snapshot, None, None]:
        errors = self._calls.errors
        member = ticket.worker
        assert isinstance(member, Member)
        run, life = next(member.runs), member.life
        ended = finished = False
        stream: Any = None
        method = member.actor.race.options(
            num_returns="streaming", _generator_backpressure_num_objects=AHEAD, concurrency_group="races"
        )
        try:
            stream = self._calls.do(method.remote, run, ticket.request)
            last: Snapshot | None = None
            for last in self._snapshots(stream):
                yield last
            ended = finished = True
            self._mend(member, life, [lane["error"] for lane in last["lanes"].values()] if last else [])
        except errors.RayTaskError as error:
            ended = True  # by an error of its own, not of the worker
            if isinstance(error.cause, BassError):
                raise error.cause from None
            self._mend(member, life, [type(error.cause).__name__])
            raise
        except errors.RayActorError as error:
            ended = True
            self._pool.lost(member, life)
            raise WorkerLost(LOST) from error
        except errors.RayError as error:
            # The worker lives, and what it sent is lost.
            raise WorkerLost(LOST) from error
        finally:
            if ended or stream is None:
                self._pool.queue.leave(ticket, finished)
            else:
                # Not on this thread: it may be an event loop's, and a round can be long.
                threading.Thread(target=self._settle, args=(ticket, run, life, stream), daemon=True).start()

    def _mend(self, member: Member, life: int, said: list[str | None]) -> None:
        """Start a worker anew whose device is broken: it would answer, and fail each race at once."""
        if said and all(BROKEN in (one or "") for one in said):
            self._pool.lost(member, life)
            self._pool.restart(member)

    def _snapshots(self, stream: Any) -> Generator[Snapshot, None, None]:
        decoder = Decoder()
        last: Snapshot | None = None
        while True:
            if self._calls.ready(stream, TELL_S if last is None else SILENCE_S):
                try:
                    reference = self._calls.do(next, stream)
                except StopIteration:
                    return
                last = decoder.decode(self._calls.get(reference))
            yield waiting(0, 0.0) if last is None else last

    def _settle(self, ticket: Ticket, run: int, life: int, stream: Any) -> None:
        """Stop the race on its worker, and free the worker once it has ended."""
        member = ticket.worker
        assert isinstance(member, Member)
        try:
            self._calls.do(member.ask, "stop", run)
            if not self._ends(stream):
                self._pool.lost(member, life)
                self._pool.restart(member)
        except (self._calls.errors.RayTaskError, Closed):
            pass  # its last word was an error, or nobody is left to race
        except Exception:
            # Whatever is wrong with it, its thread in the pool finds out.
            self._pool.lost(member, life)
        finally:
            self._pool.queue.leave(ticket)

    def _ends(self, stream: Any) -> bool:
        """Whether the stream's end comes within ENDING_S of silence; what is still in it is thrown away."""
        while True:
            if not self._calls.ready(stream, ENDING_S):
                return False
            try:
                self._calls.get(self._calls.do(next, stream))
            except StopIteration:
                return True
