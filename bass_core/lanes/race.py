"""Several decoders answering one request on one device, watched while they run.

Contract: `race` checks its arguments at the call and returns a generator of snapshots, plain data, about ten a
second and a last one with done=True. Closing the generator ends the work and frees what was taken. Scheduling:
"fair" always steps the lane whose own clock is furthest behind, so that a snapshot shows what identical machines
would show at one instant; "overlap" gives each lane a thread, and on a GPU a stream; "in_turn" runs one lane
after another. The texts are the same in all three for greedy or coupled text or a fixed draft length.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch

from kernels.support import is_accelerator, own_stream, runtime

from ..decoding.admission import admit
from ..decoding.request import Request, make_request
from ..errors import BassError, MemoryShortage, RequestError
from ..machine.capture import empty_cache
from ..machine.monitor import Monitor
from ..models.pair import ModelPair
from .comparison import comparison, reference_lane
from .lane import Lane
from .methods import DEFAULT_LANES, METHODS, Method, find_method
from .snapshot import DeviceReading, LaneSnapshot, Snapshot

SCHEDULINGS = ("fair", "overlap", "in_turn")
SNAPSHOT_SECONDS = 0.1

_log = logging.getLogger(__name__)


def race(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    lanes: Seq[str] = DEFAULT_LANES,
    scheduling: str = "fair",
    **arguments: Any,
) -> Iterator[Snapshot]:
    """Snapshots of the lanes' methods answering the prompt; further arguments as for `generate`.

    Raises RequestError at once for a bad argument or a request that does not fit the memory, and MemoryShortage
    midway where the memory runs out all the same; everything is freed then.
    """
    known = f"lanes must name different methods out of {', '.join(METHODS)}; got {lanes!r}."
    if not isinstance(lanes, list | tuple) or not lanes:
        raise RequestError(known)
    methods = [find_method(method) for method in lanes]
    if len({method.name for method in methods}) != len(methods):
        raise RequestError(known)
    if scheduling not in SCHEDULINGS:
        raise RequestError(f"scheduling must be one of {', '.join(SCHEDULINGS)}; got {scheduling!r}.")
    request = make_request(pair, prompt, **arguments)
    for method in methods:
        if method.check is not None:
            method.check(pair, request)
    admit(pair, request, *([methods] if scheduling != "in_turn" else [[method] for method in methods]))
    return _run(pair, request, methods, scheduling)


def _run(pair: ModelPair, request: Request, methods: list[Method], scheduling: str) -> Iterator[Snapshot]:
    start = time.perf_counter()
    monitor = Monitor(pair.device)
    lanes: list[Lane] = []
    schedule = {"fair": _fair, "overlap": _overlap, "in_turn": _in_turn}[scheduling]
    try:
        monitor.start()
        lanes += [Lane(pair, request, method.name) for method in methods]
        for _ in schedule(lanes, pair.device):
            snapshot = _snapshot(lanes, monitor, scheduling, start)
            if not snapshot["done"]:
                yield snapshot
        last = _snapshot(lanes, monitor, scheduling, start)
        found = comparison(pair, request, lanes)
        if found is not None:
            last["comparison"] = found
        yield last
    finally:
        monitor.stop()
        for lane in lanes:
            lane.end("stopped")
        empty_cache(pair.device)


def _fair(lanes: list[Lane], device: torch.device) -> Iterator[None]:
    """Steps the lane that is furthest behind; yields whenever a snapshot is due.

    A lane that works on between its steps (AMUSD's draft) has a slice of its own and is then paused.
    """
    due = time.perf_counter() + SNAPSHOT_SECONDS
    while running := [lane for lane in lanes if not lane.finished]:
        lane = min(running, key=lambda lane: lane.clock.ms)
        until = lane.clock.ms + lane.slice_ms
        _step(lane)
        while not lane.finished and lane.clock.ms < until:
            _step(lane)
        _guarded(lane, lane.pause)
        if time.perf_counter() >= due:
            yield
            due = time.perf_counter() + SNAPSHOT_SECONDS


def _in_turn(lanes: list[Lane], device: torch.device) -> Iterator[None]:
    """Runs each lane alone, to its end."""
    for lane in lanes:
        yield from _fair([lane], device)


def _overlap(lanes: list[Lane], device: torch.device) -> Iterator[None]:
    """A thread a lane; yields on time while any of them runs, and joins them all before it ends."""
    # Before any clock runs: a capture holds up the device for all lanes.
    for lane in lanes:
        _guarded(lane, lane.prepare)
    built = runtime(device).current_stream(device) if is_accelerator(device) else None
    stop = threading.Event()
    short: list[MemoryShortage] = []

    def work(lane: Lane) -> None:
        try:
            run(lane)
        except MemoryShortage as error:
            short.append(error)
            stop.set()

    def run(lane: Lane) -> None:
        with own_stream(device):
            if built is not None:
                # The stream that made the lanes may still be clearing their buffers.
                runtime(device).current_stream(device).wait_stream(built)
            while not lane.finished and not stop.is_set():
                _step(lane)

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in lanes]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(SNAPSHOT_SECONDS)
            yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if short:
        raise short[0]


def _step(lane: Lane) -> None:
    """One step; a lane that fails ends with a message, and the others go on. Memory is everyone's."""
    _guarded(lane, lane.step)


def _guarded(lane: Lane, action: Callable[[], object]) -> None:
    try:
        with lane.lock:
            action()
    except MemoryShortage:
        raise
    except BassError as error:
        lane.fail(str(error))
    except Exception as error:
        _log.exception("the %s lane failed", lane.method)
        # The frames of the failed step hold its caches, and live as long as whoever keeps the log record.
        traceback.clear_frames(error.__traceback__)
        lane.fail(f"This lane stopped on an internal error ({type(error).__name__}); the others go on.")


def _snapshot(lanes: list[Lane], monitor: Monitor, scheduling: str, start: float) -> Snapshot:
    views: dict[str, LaneSnapshot] = {}
    for lane in lanes:
        with lane.lock:
            views[lane.method] = lane.view()
    reference = reference_lane(lanes)
    base = None if reference is None else views[reference.method]["metrics"]["ms_per_token"]
    for view in views.values():
        own = view["metrics"]["ms_per_token"]
        view["metrics"]["speedup"] = base / own if base and own else None
    return {
        "done": all(view["finished"] for view in views.values()),
        "scheduling": scheduling,
        "elapsed_ms": 1000 * (time.perf_counter() - start),
        "lanes": views,
        "device": cast(DeviceReading, monitor.latest()),
    }
