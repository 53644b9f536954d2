"""The order in which the lanes of a race are stepped (`SCHEDULINGS`).

Each schedule yields `due_s` seconds after the last snapshot, and at once when `stopped` returns True. A lane that
fails ends with a message and the others go on, but a memory shortage affects every lane, so it is raised.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from kernels.support import is_accelerator, new_stream, runtime

from ..errors import BassError, MemoryShortage, is_failure
from .lane import Lane

_log = logging.getLogger(__name__)
Stopped = Callable[[], bool]


def fair(
    lanes: list[Lane], device: torch.device, due_s: float, stopped: Stopped = lambda: False
) -> Iterator[None]:
    """Step the lane whose clock is furthest behind.

    A lane that also works between its steps (AMUSD's draft) runs for `slice_ms` of lane time and is then paused.
    """
    for lane in lanes:
        _guarded(lane, lane.prepare)
    due, last = time.perf_counter() + due_s, None
    while running := [lane for lane in lanes if not lane.finished]:
        lane = min(running, key=lambda lane: lane.clock.ms)
        if lane.slice_ms and lane is not last and is_accelerator(device):
            # Its draft runs on another stream. Wait, so that no round of another lane runs at the same time.
            runtime(device).current_stream(device).synchronize()
        last = lane
        turn_end_ms = lane.clock.ms + lane.slice_ms
        _step(lane)
        while not lane.finished and lane.clock.ms < turn_end_ms and not stopped():
            _step(lane)
        _guarded(lane, lane.pause)
        if stopped() or time.perf_counter() >= due:
            yield
            due = time.perf_counter() + due_s


def in_turn(
    lanes: list[Lane], device: torch.device, due_s: float, stopped: Stopped = lambda: False
) -> Iterator[None]:
    """Run one lane after another, each to its end."""
    for lane in lanes:
        yield from fair([lane], device, due_s, stopped)


def overlap(
    lanes: list[Lane], device: torch.device, due_s: float, stopped: Stopped = lambda: False
) -> Iterator[None]:
    """Run each lane in its own thread. Yield every `due_s` seconds while any runs, and join all at the end."""
    # Prepare before any clock runs, because a graph capture holds up the device for all lanes.
    for lane in lanes:
        _guarded(lane, lane.prepare)
    build_stream = runtime(device).current_stream(device) if is_accelerator(device) else None
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(lane: Lane) -> None:
        try:
            run(lane)
        except BaseException as error:  # a memory shortage, or an error in `stopped`
            failures.append(error)
            stop.set()

    def run(lane: Lane) -> None:
        with new_stream(device):
            if build_stream is not None:
                # Wait, because the stream on which the lanes were built may still be clearing their buffers.
                runtime(device).current_stream(device).wait_stream(build_stream)
            while not lane.finished and not stop.is_set() and not stopped():
                _step(lane)

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in lanes]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(due_s)
            yield
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:  # Ctrl-C may come before all threads have started
                thread.join()
    if failures:
        raise failures[0]


def _step(lane: Lane) -> None:
    """Run one step. An error ends this lane with a message, but a memory shortage is raised."""
    _guarded(lane, lane.step)


def _guarded(lane: Lane, action: Callable[[], object]) -> None:
    with lane.turn:
        pass  # a waiting snapshot goes first
    try:
        with lane.held:
            if not lane.finished:  # a snapshot may have ended it
                action()
    except MemoryShortage:
        raise
    except BassError as error:
        lane.fail(str(error))
    except BaseException as error:
        if not is_failure(error):
            raise
        _log.exception("the %s lane failed", lane.method)
        # The traceback's frames hold the failed step's caches, and live as long as the log record does.
        traceback.clear_frames(error.__traceback__)
        lane.fail(f"This lane stopped on an internal error ({type(error).__name__}). The other lanes go on.")


# The schedules, in the order in which the page lists them.
SCHEDULINGS: dict[str, Callable[[list[Lane], torch.device, float, Stopped], Iterator[None]]] = {
    "fair": fair,
    "overlap": overlap,
    "in_turn": in_turn,
}
