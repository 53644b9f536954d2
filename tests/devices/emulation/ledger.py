"""What the emulated device notes down for a test to look at.

Contract: counters only grow until `clear`; nobody but the emulation writes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Race:
    """Work of two streams on the same memory that nothing puts in an order."""

    operator: str
    stream: tuple[int, int]
    before: tuple[int, int]
    kind: str


# Values read on the host, by what read them: each makes the host wait for the device.
reads: Counter[str] = Counter()
# Explicit waits of the host: "device", "stream" and "event".
waits: Counter[str] = Counter()
# Copies from the host: "queued", "blocking" (the host waits for the stream), "captured" (frozen in a graph).
uploads: Counter[str] = Counter()
races: list[Race] = []


def clear() -> None:
    """Forget everything noted so far."""
    for counter in (reads, waits, uploads):
        counter.clear()
    races.clear()
