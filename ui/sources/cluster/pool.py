"""Starts the workers on Ray, watches them, and makes them ready again after one died. Call `WorkerPool.start`.

Each worker has a thread here. The thread loads the worker, adds it to the queue, waits for the end of its process,
removes it from the queue and starts over. The thread also starts over if a race has lost contact with a live
worker. Ray restarts a worker that died, on another node if its node is gone. The other workers continue.
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
from ui.sources.cluster.start import SLICE_S, Calls, FrontClosed
from ui.sources.cluster.worker import Worker
from ui.sources.queue import Queue
from ui.sources.source import PairInfo, PairOptions

log = logging.getLogger(__name__)

# RELOAD_S: seconds until the next try with a worker that could not load its model.
# RETURN_S: seconds until the next try with a worker that is not reachable.
RELOAD_S, RETURN_S = 30.0, 0.5
# Seconds within which a worker whose process ended should be back. If it takes longer, we report a problem.
BACK_S = 180.0
DIES = (
    "A worker's process ends while it loads the models. Its node may lack memory or a package: see the server's "
    "log for details."
)
# A worker's threads besides its race: one waits for the process to end (`Worker.stay`), the others answer calls.
ANSWERS = 4
# Prefixes of the environment variables that are passed to a worker, and variables that are never passed.
PASSED = ("BASS_", "HF_")
WITHHELD = ("BASS_PASSWORD",)


@dataclass(eq=False)
class Member:
    """One worker.

    Attributes:
        number: its number on the page, from 1 on.
        life: the number of its earlier processes.
        since: time.monotonic() when its last process was lost, or when this object was made.
        problem: why it can't load its model, or "".
        facts: its pair, or None while it is not ready.
        runs: numbers for its races.
    """

    number: int
    actor: Any
    life: int = 0
    since: float = field(default_factory=time.monotonic)
    problem: str = ""
    facts: PairInfo | None = None
    runs: itertools.count[int] = field(default_factory=itertools.count)

    def ask(self, method: str, *values: object) -> Any:
        """Call a method while a race may be running. Return Ray's reference. Call this through Calls."""
        return getattr(self.actor, method).options(concurrency_group="answers").remote(*values)


class WorkerPool:
    """The workers, each a Ray actor.

    Args:
        ask: the pair to load.
        threads: the models' CPU threads per worker.
        options: Ray's options of each actor.
        queue: gets the workers that are ready.
    """

    def __init__(
        self,
        calls: Calls,
        ask: PairOptions,
        limits: Limits,
        *,
        workers: int,
        threads: int,
        options: Mapping[str, Any],
        queue: Queue,
    ) -> None:
        self.calls, self.queue = calls, queue
        self._arguments = ask, limits, threads
        environment = {k: v for k, v in os.environ.items() if k.startswith(PASSED) and k not in WITHHELD}
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
        self._actors = calls.ray.remote(
            max_restarts=-1,
            concurrency_groups={"races": 1, "answers": ANSWERS},
            runtime_env={"env_vars": environment},
            **options,
        )(Worker)
        self._changed = threading.Condition()
        self.members = [Member(number, self._actor(number)) for number in range(1, workers + 1)]

    def start(self) -> PairInfo:
        """Start to load all workers, and return the pair of the first one that is ready.

        Raises:
            BassError: if no worker can load its model.
        """
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
        """Return the workers that have loaded their pair and are alive, as far as is known."""
        return [member for member in self.members if member.facts is not None]

    def problem(self) -> str:
        """Return why no worker can load its model, or "" if one can or may still do so."""
        return self.members[0].problem if all(member.problem for member in self.members) else ""

    def lost(self, member: Member, life: int) -> None:
        """Note that the worker's process number `life` died. It gets no race until it is loaded again."""
        with self._changed:
            if member.life == life:
                if member.facts is not None:
                    member.since = time.monotonic()
                member.life, member.facts = life + 1, None
                self.queue.remove(member)

    def restart(self, member: Member) -> None:
        """Kill a worker that does not answer. Ray starts it again."""
        try:
            self.calls.do(self.calls.ray.kill, member.actor, no_restart=False)
        except self.calls.errors.RayError:
            log.warning("Worker %d was already gone when it was to be restarted.", member.number)

    def _actor(self, number: int) -> Any:
        return self._actors.remote(*self._arguments, number)

    def _tend(self, member: Member) -> None:
        """Keep one worker ready until Ray is shut down."""
        try:
            while True:
                pause = self._live(member)
                self.lost(member, member.life)
                self.calls.closed.wait(pause)
        except FrontClosed:
            return
        except Exception:
            log.exception("Worker %d is out of service.", member.number)

    def _live(self, member: Member) -> float:
        """Load the worker and wait for its end. Return the seconds until the next try."""
        calls, errors = self.calls, self.calls.errors
        ready, life = False, member.life
        try:
            self._ready(member, calls.get(calls.do(member.ask, "load")))
            ready = True
            self._stays(member, life)
        except errors.RayTaskError as error:
            self._report(member, str(error.cause) if isinstance(error.cause, BassError) else "")
            return RELOAD_S
        except errors.ActorDiedError:
            # Ray has given up on it, e.g. because its process can't start.
            member.actor = calls.do(self._actor, member.number)
            return RETURN_S if ready else self._died(member)
        except errors.RayError:
            # Ray is restarting it, which takes long on a busy machine.
            if not ready:
                self._died(member)
            return RETURN_S
        return RETURN_S

    def _stays(self, member: Member, life: int) -> None:
        """Wait until the worker's process ends, which raises, or until a race has reported it as lost."""
        stay = self.calls.do(member.ask, "stay")
        while member.life == life:
            if self.calls.ready(stay, SLICE_S):
                self.calls.get(stay)
                return

    def _died(self, member: Member) -> float:
        """Handle a process that ended too early or is not back yet. Return the seconds until the next try."""
        if time.monotonic() - member.since < BACK_S:
            return RETURN_S
        self._report(member, DIES)
        return RELOAD_S

    def _ready(self, member: Member, facts: PairInfo) -> None:
        with self._changed:
            member.facts, member.problem = facts, ""
            self.queue.add(member)
            self._changed.notify_all()

    def _report(self, member: Member, problem: str) -> None:
        with self._changed:
            problem = problem or "The workers could not load the model; the server's log has the details."
            if problem != member.problem:
                log.error("Worker %d can't load its model: %s", member.number, problem)
            member.problem = problem
            self._changed.notify_all()
