"""A worker: a process that has loaded a pair and runs races, one at a time.

`Worker` is a plain class that does not use Ray. pool.py makes it a Ray actor. `race` runs in one thread. All other
methods may be called meanwhile from other threads.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import closing

from bass_core import DeviceReading, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.delta import Delta, DeltaEncoder
from ui.sources.local import Local
from ui.sources.source import NOTHING, Count, PairInfo, PairOptions, give_memory_back


class Worker:
    """One worker.

    Args:
        threads: the models' CPU threads, which its environment sets.
        number: its number on the page, from 1 on.
    """

    def __init__(self, ask: PairOptions, limits: Limits, threads: int, number: int) -> None:
        self._ask, self._limits, self._threads, self._number = ask, limits, threads, number
        self._loading = threading.Lock()
        self._local: Local | None = None
        self._info: PairInfo | None = None
        self._count: Count | None = None
        self._stopped: set[int] = set()
        self._forever = threading.Event()

    def load(self) -> PairInfo:
        """Load the pair, unless it is loaded already. Raises BassError."""
        with self._loading:
            if self._info is None:
                local = Local(self._ask)
                # This may measure, so it comes before the idle work.
                info = local.facts(self._threads)
                local.idle.start()
                self._count, self._local, self._info = local.count(self._limits), local, info
            return self._info

    def stay(self) -> None:
        """Block until the next call of `stay`. If the process ends, the caller gets an error from Ray."""
        current = threading.Event()
        before, self._forever = self._forever, current
        before.set()
        current.wait()

    def count(self, prompt: str, by_line: bool) -> str:
        """Count a prompt's tokens (see Count in ui/sources/source.py)."""
        return NOTHING if self._count is None else self._count(prompt, by_line)

    def stop(self, run: int) -> None:
        """End the race of that number within one round, or before it begins."""
        self._stopped.add(run)

    def race(self, run: int, request: RaceRequest) -> Generator[Delta, None, None]:
        """Yield the deltas of a race (ui/sources/delta.py) until it is done or stopped.

        Args:
            run: the number of this race, for `stop`.

        Raises:
            BassError: if the race is refused.
        """
        self.load()
        assert self._local is not None
        # Forget stops that came after the end of their race.
        for old in [number for number in list(self._stopped) if number < run]:
            self._stopped.discard(old)
        encoder = DeltaEncoder()
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
        """Return the snapshot with the worker added to the device's name."""
        device: DeviceReading = {**snapshot["device"]}
        if "name" in device:
            device["name"] = f"{device['name']}, worker {self._number} on {socket.gethostname()}"
        return {**snapshot, "device": device}
