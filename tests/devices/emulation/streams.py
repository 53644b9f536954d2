"""Streams and events of the emulated device, as in torch.cuda.

order.py defines the order of their work. New streams come in turn from a pool, so two of them may be the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import ledger, order

# torch's number of pooled streams per device and priority.
POOLED = 32
_turns = {
    (number, urgent): itertools.cycle(range(1 + urgent * POOLED, 1 + (1 + urgent) * POOLED))
    for number in range(order.DEVICES)
    for urgent in (False, True)
}


class Stream:
    """One of a device's POOLED streams, in turn; priorities below 0 have a separate pool."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        number = order.index_of(device)
        self.device = torch.device(order.TYPE, number)
        self.stream_id = next(_turns[number, priority < 0]) if stream_id is None else stream_id
        self.key: order.Key = (number, self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Stream{self.key}"

    def synchronize(self) -> None:
        order.forbid("stream.synchronize", self.key)
        order.check_synchronising("stream.synchronize")
        with order.lock:
            ledger.waits["stream"] += 1
            order.host_waits(order.queue(self.key).clock)

    def query(self) -> bool:
        order.forbid("stream.query", self.key)
        with order.lock:
            order.host_waits(order.queue(self.key).clock)
        return True

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is used if none was chosen."""
    return Stream(order.index_of(device), stream_id=0)


def current_stream(device: Any = None) -> Stream:
    number = order.index_of(device)
    chosen: dict[int, Stream] = getattr(order.local, "streams", {})
    return chosen.get(number) or default_stream(number)


def current_key(number: int) -> order.Key:
    """Return `current_stream(number).key`, which every operator needs."""
    chosen: dict[int, Stream] = getattr(order.local, "streams", {})
    return chosen[number].key if number in chosen else (number, 0)


def set_stream(stream: Stream) -> None:
    order.local.device = stream.key[0]
    order.local.streams = {**getattr(order.local, "streams", {}), stream.key[0]: stream}


class stream:
    """Make a stream this thread's current one in the block; also after it, if a capture fails to end."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device, self._before = order.current_device(), current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            set_stream(self._before)
            order.local.device = self._device


class Event:
    """A point in a stream: by default the current device's, even if the work ran on another device."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timing = enable_timing
        self.key: order.Key | None = None
        self.clock: order.Clock = {}
        self.ms = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        if self.key is not None and self.key[0] != stream.key[0]:
            raise RuntimeError(f"Event device {self.key[0]} does not match recording stream's {stream.key[0]}.")
        with order.lock:
            stream_queue = order.queue(stream.key)
            order.after_host(stream_queue)
            stream_queue.clock[stream.key] += 1
            self.key, self.clock, self.ms = stream.key, dict(stream_queue.clock), stream_queue.ms

    def wait(self, stream: Stream | None = None) -> None:
        stream_queue = order.queue((current_stream() if stream is None else stream).key)
        with order.lock:
            order.follows(stream_queue.clock, self.clock)
            stream_queue.ms = max(stream_queue.ms, self.ms)

    def synchronize(self) -> None:
        order.forbid("event.synchronize", self.key)
        with order.lock:
            ledger.waits["event"] += 1
            order.host_waits(self.clock)

    def query(self) -> bool:
        order.forbid("event.query", self.key)
        with order.lock:
            order.host_waits(self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the emulated milliseconds from this event to `end`. The host must have waited for both events."""
        if not (self.timing and end.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.key is None or end.key is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.key[0] != end.key[0]:
            raise RuntimeError("events of two devices have no time between them: invalid resource handle")
        if any(order.host.get(event.key, 0) < event.clock[event.key] for event in (self, end)):
            raise RuntimeError("device not ready")
        return end.ms - self.ms
