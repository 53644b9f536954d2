"""The emulated device's records, for tests to read.

Counters grow until `clear`; only the emulation writes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Race:
    """Work of two streams on the same memory, with no order between them."""

    operator: str
    stream: tuple[int, int]
    before: tuple[int, int]
    kind: str


# Values read on the host, by operator; each read makes the host wait for the device.
reads: Counter[str] = Counter()
# Explicit waits of the host, by kind: "device", "stream" and "event".
waits: Counter[str] = Counter()
# Copies from the host, by kind: "queued", "blocking" (the host waits) and "captured" (frozen in a graph).
uploads: Counter[str] = Counter()
races: list[Race] = []


def clear() -> None:
    for counter in (reads, waits, uploads):
        counter.clear()
    races.clear()
