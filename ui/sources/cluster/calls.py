"""Ray's calls, which must all have returned before Ray is shut down.

Contract: whoever calls Ray on a thread does so through `Calls`. No call lasts much longer than SLICE_S, and once
`close` has begun, each raises Closed: a thread that asked Ray for something after its end would start it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from bass_core import BassError

# Seconds of one call, and seconds for which `close` waits for calls.
SLICE_S, CLOSING_S = 0.5, 10.0
T = TypeVar("T")


class Closed(BassError):
    """The program is ending."""


class Calls:
    """`ray`, called by several threads until `close`."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.errors = ray, ray.exceptions
        self.closed = threading.Event()
        self._running, self._changed = 0, threading.Condition()

    def do(self, call: Callable[..., T], *values: Any, **named: Any) -> T:
        """Call something of Ray that returns soon."""
        with self._changed:
            if self.closed.is_set():
                raise Closed("The server is ending: try again once it is back.")
            self._running += 1
        try:
            return call(*values, **named)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def ready(self, what: Any, seconds: float) -> bool:
        """Whether a reference, or a stream's next one, is there within these seconds."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            there, _ = self.do(self.ray.wait, [what], timeout=max(0.0, min(SLICE_S, left)))
            if there or left <= SLICE_S:
                return bool(there)

    def get(self, reference: Any, seconds: float = float("inf")) -> Any:
        """What the reference stands for. Raises TimeoutError, or what the call raised."""
        if not self.ready(reference, seconds):
            raise TimeoutError
        return self.do(self.ray.get, reference)

    def close(self) -> None:
        """Refuse further calls, and wait for those that run."""
        with self._changed:
            self.closed.set()
            self._changed.wait_for(lambda: self._running == 0, CLOSING_S)
