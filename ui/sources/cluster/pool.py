"""The workers on Ray: made, loaded, watched, and made ready again after one died.

Contract: each worker has a thread here that loads it, hands it to the queue, waits for its death, takes it out of
the queue and begins again, also where a race has lost a worker that lives. Ray restarts a worker that died, on
another node where its own is gone; the others go on. `start` returns once a worker is ready, and raises BassError,
a worker's refusal, if none can load the model. Non-goals: the way of a race (races.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bass_core import BassError
from ui.page.limits import Limits
from ui.sources.cluster.start import SLICE_S, Calls, Closed
from ui.sources.cluster.worker import Worker
from ui.sources.queue import Queue
from ui.sources.source import Ask, Facts

log = logging.getLogger(__name__)

# Seconds until a worker is asked again that could not load, and one that is not there.
RELOAD_S, RETURN_S = 30.0, 0.5
# Seconds in which a worker whose process ended must be back, or on its way: ends after that are called a problem.
BACK_S = 60.0
DIES = (
    "A worker's process ends while it loads the models, for want of memory or of a package on its node: the "
    "server's log has the details."
)
# Threads of a worker beside its race: one waits for ever, the others answer.
ANSWERS = 4
# Variables of this program that a worker on another machine needs too; a password is none of its business.
PASSED = ("BASS_", "HF_")
KEPT = ("BASS_PASSWORD",)


@dataclass(eq=False)
class Member:
    """One worker. `life` counts its processes; `since` is when the last one was lost, or this was made, on the
    monotonic clock; `problem` is why it can't load."""

    number: int
    actor: Any
    life: int = 0
    since: float = field(default_factory=time.monotonic)
    problem: str = ""
    facts: Facts | None = None
    runs: itertools.count[int] = field(default_factory=itertools.count)

    def ask(self, method: str, *values: object) -> Any:
        """Call a method beside the race; returns Ray's reference. To be called through Calls."""
        return getattr(self.actor, method).options(concurrency_group="answers").remote(*values)


class Pool:
    """`workers` workers for `ask`, each an actor with these options of Ray and so many threads."""

    def __init__(
        self,
        calls: Calls,
        ask: Ask,
        limits: Limits,
        *,
        workers: int,
        threads: int,
        options: Mapping[str, Any],
        queue: Queue,
    ) -> None:
        self.calls, self.queue = calls, queue
        self._arguments = ask, limits, threads
        environment = {k: v for k, v in os.environ.items() if k.startswith(PASSED) and k not in KEPT}
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
        self._actors = calls.ray.remote(
            max_restarts=-1,
            concurrency_groups={"races": 1, "answers": ANSWERS},
            runtime_env={"env_vars": environment},
            **options,
        )(Worker)
        self._changed = threading.Condition()
        self.members = [Member(number, self._actor(number)) for number in range(1, workers + 1)]

    def start(self) -> Facts:
        """Load all workers; returns what the first one that is ready says of itself."""
        for member in self.members:
            threading.Thread(target=self._tend, args=(member,), name="bass-worker", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.ready() or all(member.problem for member in self.members))
        ready = self.ready()
        if not ready:
            raise BassError(self.members[0].problem)
        assert ready[0].facts is not None
        return ready[0].facts

    def ready(self) -> list[Member]:
        """The workers that have loaded their pair and live, as far as is known."""
        return [member for member in self.members if member.facts is not None]

    def problem(self) -> str:
        """Why no worker can load its model; "" while one can, or may."""
        return self.members[0].problem if all(member.problem for member in self.members) else ""

    def lost(self, member: Member, life: int) -> None:
        """The worker died in that life: no race goes to it until it is loaded again."""
        with self._changed:
            if member.life == life:
                if member.facts is not None:
                    member.since = time.monotonic()
                member.life, member.facts = life + 1, None
                self.queue.remove(member)

    def restart(self, member: Member) -> None:
        """End a worker that does not answer; Ray starts it again."""
        try:
            self.calls.do(self.calls.ray.kill, member.actor, no_restart=False)
        except self.calls.errors.RayError:
            log.warning("Worker %d was gone before it could be ended.", member.number)

    def _actor(self, number: int) -> Any:
        return self._actors.remote(*self._arguments, number)

    def _tend(self, member: Member) -> None:
        """Keep one worker ready until Ray is shut down."""
        try:
            while True:
                pause = self._live(member)
                self.lost(member, member.life)
                self.calls.closed.wait(pause)
        except Closed:
            return
        except Exception:
            log.exception("Worker %d is out of service.", member.number)

    def _live(self, member: Member) -> float:
        """Load the worker and wait for its end; returns the seconds until it is to be asked again."""
        calls, errors = self.calls, self.calls.errors
        ready, life = False, member.life
        try:
            self._ready(member, calls.get(calls.do(member.ask, "load")))
            ready = True
            self._stays(member, life)
        except errors.RayTaskError as error:
            self._tell(member, str(error.cause) if isinstance(error.cause, BassError) else "")
            return RELOAD_S
        except errors.ActorDiedError:
            # Ray has given it up, as when its process can't start.
            member.actor = calls.do(self._actor, member.number)
            return RETURN_S if ready else self._died(member)
        except errors.RayError:
            # It is on its way back.
            return RETURN_S if ready else self._died(member)
        return RETURN_S

    def _stays(self, member: Member, life: int) -> None:
        """Wait for the end of the worker's process, which raises, or of its life, where a race has lost it."""
        stay = self.calls.do(member.ask, "stay")
        while member.life == life:
            if self.calls.ready(stay, SLICE_S):
                self.calls.get(stay)
                return

    def _died(self, member: Member) -> float:
        """Its process ended before it was ready, or is not back yet; returns the seconds to the next try."""
        if time.monotonic() - member.since < BACK_S:
            return RETURN_S
        self._tell(member, DIES)
        return RELOAD_S

    def _ready(self, member: Member, facts: Facts) -> None:
        with self._changed:
            member.facts, member.problem = facts, ""
            self.queue.add(member)
            self._changed.notify_all()

    def _tell(self, member: Member, problem: str) -> None:
        with self._changed:
            member.problem = problem or "The workers could not load the model; the server's log has the details."
            log.error("Worker %d can't load its model: %s", member.number, member.problem)
            self._changed.notify_all()
