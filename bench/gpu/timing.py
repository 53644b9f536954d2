"""Times device work (CUDA events, warm-up, medians; a monotonic clock in a dry run on a CPU) and compiling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .context import Context


@contextmanager
def counted_compiles(ctx: Context) -> Iterator[None]:
    """On exit reports how many kernels Triton compiled in the context, the seconds it took, and its cache hits."""
    found: list[tuple[bool, float]] = []

    def listen(*_: Any, times: Any = None, cache_hit: bool = False, **__: Any) -> None:
        found.append((cache_hit, float(getattr(times, "total", 0)) / 1e6))

    try:
        from triton import knobs

        knobs.compilation.listener = listen
    except (ImportError, AttributeError):  # no Triton, or one before 3.4
        yield
        return
    try:
        yield
    finally:
        knobs.compilation.listener = None
        made = [seconds for hit, seconds in found if not hit]
        ctx.row(
            "Triton", "compiling", sum(made), "s", f"{len(made)} kernels, {len(found) - len(made)} from its cache"
        )


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int = 20, warmup: int = 3) -> float:
    """The median time of a call in ms, from its first launch to the end of its last kernel."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    for _ in range(warmup):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def captured_ms(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 15) -> float:
    """The median time per call in ms, with all calls captured in one CUDA graph, so without host overhead.

    Give each call its own buffers, so that the cache does not hold what a real step would have to fetch.
    """
    if device.type != "cuda":
        return milliseconds(lambda: [call() for call in calls[:1]], device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return milliseconds(graph.replay, device, repeats) / len(calls)
