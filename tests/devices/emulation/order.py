"""The order of the emulated device's work, and the host's waits.

Work is computed immediately, in the order of the host's calls. Only the order that a GPU would guarantee is
tracked. Each stream has a vector clock: if two streams use the same memory without an order between them,
`ledger.races` records it. Non-blocking copies to the host arrive when the host waits for them. Each operator takes
OP_MS milliseconds of its stream, so that equal work takes equal times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from . import ledger

TYPE = "emul"
DEVICES = 2
OP_MS = 0.01

Key = tuple[int, int]
Clock = dict[Key, int]


class Touched(Protocol):
    """The fields by which races are found: the last writer of a memory, and its readers since that write."""

    writer: tuple[Key, int] | None
    readers: dict[Key, int]


class Underway(Protocol):
    """The fields of a running capture by which `forbid` decides whether it breaks the capture."""

    key: Key
    thread: int
    mode: str
    broken: str | None


@dataclass
class Queue:
    """A stream's work so far.

    Attributes:
        clock: For each stream, the newest tick that is certain to be over before this stream's next work.
        ms: Emulated milliseconds of the work.
        arriving: (tick, copy) of copies to the host that have not arrived.
        waits: The host's number of waits when `clock` was last extended by them.
    """

    clock: Clock = field(default_factory=dict)
    ms: float = 0.0
    arriving: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    waits: int = 0


lock = threading.RLock()
captures: list[Underway] = []
sync_debug_mode = 0
_queues: dict[Key, Queue] = {}
host: Clock = {}
_host_waited = 0
local = threading.local()


def index_of(device: Any = None) -> int:
    """Return the number of a device, in any form that torch accepts; without a number, the current device's."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        index: int | None = device
    else:
        device = torch.device(device)
        if device.type != TYPE:
            raise ValueError(f"Expected a device of type {TYPE}, got {device}")
        index = device.index
    number = current_device() if index is None else index
    if not 0 <= number < DEVICES:
        raise RuntimeError(f"{TYPE} has no device {number}: invalid device ordinal")
    return number


def current_device() -> int:
    return getattr(local, "device", 0)


def set_device(device: Any) -> None:
    local.device = index_of(device)


@contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        local.device = before


def queue(key: Key) -> Queue:
    if key not in _queues:
        _queues[key] = Queue(clock={key: 0})
    return _queues[key]


def forbid(what: str, key: Key | None = None) -> None:
    """Raise and break a running capture that, as in CUDA, forbids a call that waits (`what`)."""
    for capture in captures:
        same_thread = capture.thread == threading.get_ident()
        if capture.key == key or capture.mode == "global" or (capture.mode == "thread_local" and same_thread):
            capture.broken = what
            raise torch.AcceleratorError(f"{what}: operation not permitted when stream is capturing")


def check_synchronising(what: str) -> None:
    """Raise under set_sync_debug_mode("error")."""
    if sync_debug_mode == 2:
        raise RuntimeError(f"called a synchronizing operation: {what}")


def host_waits(clock: Clock) -> None:
    """Record that the host waited for all work up to `clock`: its copies arrive, and later work comes after it."""
    global _host_waited
    _host_waited += 1
    for key, tick in clock.items():
        host[key] = max(tick, host.get(key, 0))
        stream_queue = queue(key)
        for due, copy in [entry for entry in stream_queue.arriving if entry[0] <= tick]:
            stream_queue.arriving.remove((due, copy))
            copy()


def follows(clock: Clock, other: Clock) -> None:
    """Extend `clock` by `other`: the work that comes after `clock` then also comes after `other`."""
    for key, tick in other.items():
        clock[key] = max(tick, clock.get(key, 0))


def after_host(stream_queue: Queue) -> None:
    """Order a stream's next work after all that the host has waited for."""
    if stream_queue.waits != _host_waited:
        follows(stream_queue.clock, host)
        stream_queue.waits = _host_waited


def touch(key: Key, reads: Iterable[Touched], writes: Iterable[Touched], operator: str) -> int:
    """Run an operator on a stream: record races with unordered earlier work, and return the operator's tick."""
    stream_queue = queue(key)
    after_host(stream_queue)
    stream_queue.clock[key] += 1
    stream_queue.ms += OP_MS
    tick, written = stream_queue.clock[key], list(writes)
    for memory in [*reads, *written]:
        if memory.writer is not None and stream_queue.clock.get(memory.writer[0], 0) < memory.writer[1]:
            ledger.races.append(ledger.Race(operator, key, memory.writer[0], "after a write"))
    for memory in written:
        for reader, at in memory.readers.items():
            if stream_queue.clock.get(reader, 0) < at:
                ledger.races.append(ledger.Race(operator, key, reader, "a write after a read"))
        memory.writer, memory.readers = (key, tick), {}
    for memory in reads:
        memory.readers[key] = tick
    return tick


def synchronize(device: Any = None) -> None:
    number = index_of(device)
    forbid("synchronize")
    with lock:
        ledger.waits["device"] += 1
        for key in [key for key in _queues if key[0] == number]:
            host_waits(queue(key).clock)


def set_sync_debug_mode(mode: int | str) -> None:
    """Make reads on the host raise if the mode is 2 or "error". Other modes change nothing."""
    global sync_debug_mode
    sync_debug_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode


def get_sync_debug_mode() -> int:
    return sync_debug_mode
