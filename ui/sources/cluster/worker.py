"""A worker: the process that holds a loaded pair and runs races, one at a time.

Contract: a plain class, which pool.py makes an actor of Ray; nothing here knows Ray. `race` yields deltas
(ui/sources/delta.py), and each run of a race has a number, by which `stop` ends it within one round, also before
it began. `race` runs on one thread; all other methods may be called beside it, on others.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import closing

from bass_core import DeviceReading, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.delta import Delta, Encoder
from ui.sources.local import Local
from ui.sources.source import NOTHING, Ask, Count, Facts, give_memory_back


class Worker:
    """`number` is its name on the page, from 1; `threads` is what its environment gives the models on a CPU."""

    def __init__(self, ask: Ask, limits: Limits, threads: int, number: int) -> None:
        self._ask, self._limits, self._threads, self._number = ask, limits, threads, number
        self._loading = threading.Lock()
        self._local: Local | None = None
        self._count: Count | None = None
        self._stopped: set[int] = set()
        self._forever = threading.Event()

    def load(self) -> Facts:
        """Load the pair, unless it is there. Raises BassError."""
        with self._loading:
            if self._local is None:
                local = Local(self._ask)
                local.idle.start()
                self._count, self._local = local.count(self._limits), local
            return self._local.facts(self._threads)

    def stay(self) -> None:
        """Returns only when it is called again: its caller learns that this process has ended."""
        mine = threading.Event()
        before, self._forever = self._forever, mine
        before.set()
        mine.wait()

    def count(self, prompt: str, by_line: bool) -> str:
        """See Count."""
        return NOTHING if self._count is None else self._count(prompt, by_line)

    def stop(self, run: int) -> None:
        """End the race of that number within one round, or before it begins."""
        self._stopped.add(run)

    def race(self, run: int, request: RaceRequest) -> Generator[Delta, None, None]:
        """The race's deltas, until it is done or stopped. Raises BassError."""
        self.load()
        assert self._local is not None
        # A stop that came after its race's end is of no use to anybody.
        for one in [one for one in list(self._stopped) if one < run]:
            self._stopped.discard(one)
        encoder = Encoder()
        try:
            with closing(self._local.source(request, lambda: run in self._stopped)) as snapshots:
                for snapshot in snapshots:
                    yield encoder.encode(self._named(snapshot))
                    if run in self._stopped:
                        return
        finally:
            self._stopped.discard(run)
            give_memory_back()

    def _named(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, whose device says on which worker it is."""
        device: DeviceReading = {**snapshot["device"]}
        if "name" in device:
            device["name"] = f"{device['name']}, worker {self._number} on {socket.gethostname()}"
        return {**snapshot, "device": device}
