"""Checks that a race leaves nothing behind: no caches, lanes or threads."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bass_core.lanes.lane import Lane
from bass_core.model.cache import RaggedCache


def alive(collect: bool = False, lanes: bool = False) -> int:
    """Return the number of caches in this process. Only caches hold a race's device memory.

    Args:
        collect: Run the garbage collector first.
        lanes: Also count lanes. (If an error is kept, as in a log, its lane stays alive, but no cache does.)
    """
    if collect:
        gc.collect()
    kinds = (RaggedCache, Lane) if lanes else (RaggedCache,)
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())


def left_behind() -> tuple[int, list[str]]:
    """Return the number of caches that exist, and the names of the race threads that still run."""
    return alive(collect=True), [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("bass-monitor", "bass-amusd"))
    ]


@contextmanager
def frees_at_once(lanes: bool = False) -> Iterator[int]:
    """Check that the block frees its caches and ends its threads, without the garbage collector.

    Yields:
        The count before the block, to compare with `alive()` inside it.
    """
    threads = set(threading.enumerate())
    before = alive(collect=True, lanes=lanes)
    gc.disable()
    try:
        yield before
        assert alive(lanes=lanes) == before and set(threading.enumerate()) <= threads
    finally:
        gc.enable()


def peak_bytes(work: Callable[[], object], folder: Path) -> int:
    """Return the largest number of bytes that torch held at once during `work`, measured by its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    current = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda event: event["ts"]):
        current += event["args"]["Bytes"]
        peak = max(peak, current)
    return peak
