"""A RaceSource that runs races on Ray workers. See `Races.source`.

- A race waits in the queue. Then one worker sends its deltas, at most AHEAD of them ahead of the reader.
- Closing a race stops it on the worker within one round. If the worker has not ended it after ENDING_S seconds,
  the worker is restarted.
- While nothing arrives, the last snapshot is yielded again at intervals, so that Stop, a closed tab and the time
  limit are noticed.
- A worker that dies during a race raises WorkerLost. If the race had not begun, another worker gets it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.request import RaceRequest
from ui.sources.cluster.pool import Member, WorkerPool
from ui.sources.cluster.start import FrontClosed
from ui.sources.delta import DeltaDecoder
from ui.sources.queue import Ticket
from ui.sources.source import NOTHING, WorkerLost, waiting

# The maximum number of snapshots that a worker may be ahead of the reader.
AHEAD = 2
# UPDATE_S: seconds between two updates of a waiting race.
# SILENCE_S: seconds without news of a running race after which its last snapshot is yielded again.
UPDATE_S, SILENCE_S = 1.0, 5.0
# Seconds for a worker to end a stopped race: many rounds of the slowest model.
ENDING_S = 120.0
# torch raises this exception once the context of a device is lost. A lane's error message contains its name.
BROKEN = "AcceleratorError"
# Seconds within which a free worker must answer.
ANSWER_S = 30.0
# Seconds to wait for the length of a prompt.
COUNT_S = 10.0
LOST = (
    "The worker that ran this race has stopped. Its text so far is kept above: press Run to race again. "
    "The other workers continue, and this one is being restarted."
)


class Races:
    """Combines the pool's workers into one RaceSource."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._calls = pool, pool.calls

    def source(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """Yield the snapshots of a race."""
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
        """Count a prompt's tokens (see Count). Return NOTHING while no worker is ready."""
        for member in self._pool.ready():
            with suppress(self._calls.errors.RayError, TimeoutError, FrontClosed):
                return str(self._calls.get(self._calls.do(member.ask, "count", prompt, by_line), COUNT_S))
        return NOTHING

    def _wait(self, ticket: Ticket) -> Generator[Snapshot, None, None]:
        """Yield waiting snapshots until the ticket has a worker."""
        queue = self._pool.queue
        try:
            while not queue.wait(ticket, UPDATE_S):
                if problem := self._pool.problem():
                    raise BassError(problem)
                yield waiting(*queue.outlook(ticket))
        except BaseException:
            queue.leave(ticket)
            raise

    def _answers(self, ticket: Ticket) -> Generator[Snapshot, None, bool]:
        """Return whether the ticket's worker answers. The queue may assign a worker that has just died."""
        queue, member = self._pool.queue, ticket.worker
        assert isinstance(member, Member)
        life, end = member.life, time.monotonic() + ANSWER_S
        try:
            reference = self._calls.do(member.ask, "load")
            while not self._calls.ready(reference, UPDATE_S):
                if time.monotonic() >= end:
                    self._pool.restart(member)
                    self._pool.lost(member, life)
                    return False
                yield waiting(0, 0.0)
            self._calls.get(reference)
            return queue.holds(ticket)
        except self._calls.errors.RayError:
            # The worker's thread in the pool makes it ready again.
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
            ended = True  # the race failed, not the worker
            if isinstance(error.cause, BassError):
                raise error.cause from None
            self._mend(member, life, [type(error.cause).__name__])
            raise
        except errors.RayActorError as error:
            ended = True
            self._pool.lost(member, life)
            raise WorkerLost(LOST) from error
        except errors.RayError as error:
            # The worker is alive, but its deltas are lost.
            raise WorkerLost(LOST) from error
        finally:
            if ended or stream is None:
                self._pool.queue.leave(ticket, finished)
            else:
                # Wait in another thread: a round can take long, and the current thread may run an event loop.
                threading.Thread(target=self._settle, args=(ticket, run, life, stream), daemon=True).start()

    def _mend(self, member: Member, life: int, errors: list[str | None]) -> None:
        """Restart a worker whose device is broken. Such a worker still answers calls, but all its races fail."""
        if errors and all(BROKEN in (error or "") for error in errors):
            self._pool.lost(member, life)
            self._pool.restart(member)

    def _snapshots(self, stream: Any) -> Generator[Snapshot, None, None]:
        decoder = DeltaDecoder()
        last: Snapshot | None = None
        while True:
            if self._calls.ready(stream, UPDATE_S if last is None else SILENCE_S):
                try:
                    reference = self._calls.do(next, stream)
                except StopIteration:
                    return
                last = decoder.decode(self._calls.get(reference))
            yield waiting(0, 0.0) if last is None else last

    def _settle(self, ticket: Ticket, run: int, life: int, stream: Any) -> None:
        """Stop the race on its worker, and free the worker once the race has ended."""
        member = ticket.worker
        assert isinstance(member, Member)
        try:
            self._calls.do(member.ask, "stop", run)
            if not self._ends(stream):
                self._pool.lost(member, life)
                self._pool.restart(member)
        except (self._calls.errors.RayTaskError, FrontClosed):
            pass  # the race ended with an error, or the program is ending
        except Exception:
            # The worker's thread in the pool finds out what is wrong.
            self._pool.lost(member, life)
        finally:
            self._pool.queue.leave(ticket)

    def _ends(self, stream: Any) -> bool:
        """Discard the rest of the stream. Return False if nothing arrives for ENDING_S seconds before its end."""
        while True:
            if not self._calls.ready(stream, ENDING_S):
                return False
            try:
                self._calls.get(self._calls.do(next, stream))
            except StopIteration:
                return True
