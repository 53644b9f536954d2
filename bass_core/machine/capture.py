"""How work is captured in a CUDA graph, and the memory that captures hold; no model is known here.

Contract: `capture` runs a function once, records it once, and returns what it returned and the replay. One capture
is made at a time, and `empty_cache` does nothing meanwhile. A capture whose end fails is the last one of the
process: torch's allocator then believes that the capture is still running, raises when cached memory is released,
and can't be told otherwise; so nothing is captured any more and `empty_cache` does nothing. `waits_refused` finds
out beforehand what would make a capture fail. Off on ZeroGPU and with BASS_GRAPHS=0.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kernels.support import is_accelerator, on, on_zero_gpu, runtime

from .memory import private_pools

# Bytes. A capture can't use memory that torch keeps cached; with less than this free, the cache is released first.
LEAST_FREE = 1 << 29

Outputs = TypeVar("Outputs")

_turn = threading.RLock()
_underway = False
_failed = False


class CaptureUnavailable(RuntimeError):
    """Nothing is captured in this process any more."""


def enabled(device: torch.device) -> bool:
    """Whether steps on the device may be captured."""
    off = on_zero_gpu() or os.environ.get("BASS_GRAPHS") == "0" or _failed
    return not off and is_accelerator(device) and hasattr(runtime(device), "CUDAGraph")


def refuses_waits(device: torch.device) -> bool:
    """Whether steps on the device are captured, and torch can be told to refuse what waits for it."""
    return enabled(device) and hasattr(runtime(device), "set_sync_debug_mode")


def failed() -> bool:
    """Whether a capture could not be ended, so that there will be no other in this process."""
    return _failed


def empty_cache(device: torch.device) -> None:
    """Give cached memory back to the device; does nothing on a CPU, during a capture, or after a failed one.

    It never blocks, since the garbage collector may call it anywhere. Memory that stays cached is still usable.
    """
    if not is_accelerator(device) or not _turn.acquire(blocking=False):
        return
    try:
        if not (_failed or _underway):
            runtime(device).empty_cache()
    finally:
        _turn.release()


@dataclass(eq=False)
class Pool:
    """The memory that captures over one cache share; they are never replayed at the same time.

    torch shares blocks only between captures on the same stream, so the pool has one, made on first use.
    """

    device: torch.device
    handle: Any = None
    stream: Any = None

    def open(self) -> None:
        """Make the pool and its stream, unless they exist."""
        if self.handle is None:
            module = runtime(self.device)
            self.handle = module.graph_pool_handle()
            # torch hands out the streams of one priority in turn, and work that another thread queued on this one
            # would be captured too. So it has a priority of its own, which no lane uses.
            self.stream = module.Stream(self.device, priority=-1)

    def reserved(self) -> int:
        """Bytes that the captures hold, for their outputs and for intermediate results."""
        return 0 if self.handle is None else private_pools(self.device).get(tuple(self.handle), (0, 0))[0]


def capture(forward: Callable[[], Outputs], pool: Pool) -> tuple[Outputs, Callable[[], Any]]:
    """Warm up (which compiles kernels and makes libraries' handles), then capture on the pool's stream.

    Raises what the forward or torch raises, and CaptureUnavailable once a capture has failed.
    """
    global _underway
    with _turn, on(pool.device):
        if _failed:
            raise CaptureUnavailable("an earlier capture failed")
        module = runtime(pool.device)
        forward()
        module.current_stream(pool.device).synchronize()
        if module.mem_get_info(pool.device)[0] < LEAST_FREE:
            module.empty_cache()
        pool.open()
        _underway = True
        try:
            return _record(forward, pool)
        finally:
            _underway = False


def _record(forward: Callable[[], Outputs], pool: Pool) -> tuple[Outputs, Callable[[], Any]]:
    module = runtime(pool.device)
    graph = module.CUDAGraph()
    _clear_workspaces()
    # Not torch.cuda.graph: it waits for the whole device, releases all caches, and leaves its stream current when
    # the end of the capture fails.
    with module.stream(pool.stream), _no_collection():
        with _final():
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            outputs = forward()
        finally:
            with _final():
                graph.capture_end()
    _clear_workspaces()
    return outputs, graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: destroying a graph on this thread would end the capture under way."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _final() -> Iterator[None]:
    """If what is done inside fails, nothing is captured any more."""
    global _failed
    try:
        yield
    except Exception:
        _failed = True
        raise


def _clear_workspaces() -> None:
    """Let cuBLAS allocate its workspace in the graph's own pool, and forget it afterwards.

    A workspace outside of it, or shared by several graphs, would be freed with the first of them and written by
    the others. Not before torch 2.10: there nothing protects the workspaces from other threads' products, and a
    graph that is dropped frees none of them.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None and torch.__version__ >= "2.10":
        clear()


@contextmanager
def waits_refused(device: torch.device) -> Iterator[None]:
    """Raise where anything waits for the device, in any thread: torch refuses waits in the whole process.

    No capture is made meanwhile. To be used where `refuses_waits`.
    """
    module = runtime(device)
    with _turn:
        before = module.get_sync_debug_mode()
        with warnings.catch_warnings():
            # The warning says that not every wait is detected; one that is missed ends in a capture that fails.
            warnings.simplefilter("ignore")
            module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            module.set_sync_debug_mode(before)
