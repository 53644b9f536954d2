"""Capture work in CUDA graphs, and account for the memory that captures hold.

`capture` runs a function once, captures it once, and returns the captured outputs and the replay. `waits_refused`
detects beforehand the waits that would make a capture fail. Only one capture runs at a time; `empty_cache` does
nothing meanwhile.

If starting or ending a capture fails, this process captures no more graphs and `empty_cache` does nothing: torch's
allocator then believes that the capture is still running, raises when cached memory is released, and can't be
reset. Captures are off on ZeroGPU and with BASS_GRAPHS=0.
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

# If fewer than this many bytes (512 MiB) are free before a capture, torch's cached memory is released, because
# captures can't use it.
LEAST_FREE = 1 << 29

Outputs = TypeVar("Outputs")

_capture_lock = threading.RLock()
_underway = False
_failed = False


class CaptureUnavailable(RuntimeError):
    """This process captures no more graphs, because an earlier capture failed."""


def enabled(device: torch.device) -> bool:
    """Return whether steps on the device may be captured."""
    disabled = on_zero_gpu() or os.environ.get("BASS_GRAPHS") == "0" or _failed
    return not disabled and is_accelerator(device) and hasattr(runtime(device), "CUDAGraph")


def refuses_waits(device: torch.device) -> bool:
    """Return whether steps on the device are captured and torch can raise on waits (`waits_refused`)."""
    return enabled(device) and hasattr(runtime(device), "set_sync_debug_mode")


def failed() -> bool:
    """Return whether a capture failed to start or end, so that this process captures no more graphs."""
    return _failed


def empty_cache(device: torch.device) -> None:
    """Return cached memory to the device; does nothing on a CPU, during a capture or after a failed one.

    It never blocks, because the garbage collector may call it anywhere. Memory that stays cached is still usable.
    """
    if not is_accelerator(device) or not _capture_lock.acquire(blocking=False):
        return
    try:
        if not (_failed or _underway):
            # Each stream that multiplied has a cuBLAS workspace, 32 MB on Hopper, and races use new streams.
            _clear_workspaces()
            runtime(device).empty_cache()
    finally:
        _capture_lock.release()


@dataclass(eq=False)
class Pool:
    """The memory shared by all captures over one KV cache, which never replay at the same time.

    torch shares blocks only between captures on the same stream, so the pool has its own stream, made on first
    use.
    """

    device: torch.device
    handle: Any = None
    stream: Any = None

    def open(self) -> None:
        """Make the pool and its stream, unless they exist."""
        if self.handle is None:
            module = runtime(self.device)
            self.handle = module.graph_pool_handle()
            # torch hands out the streams of a priority round-robin, so another thread could get the same stream,
            # and its work would be captured too. That can't happen here, because no lane uses this priority.
            self.stream = module.Stream(self.device, priority=-1)

    def reserved(self) -> int:
        """Return the bytes that the captures hold for outputs and intermediate results."""
        return 0 if self.handle is None else private_pools(self.device).get(tuple(self.handle), (0, 0))[0]


def capture(forward: Callable[[], Outputs], pool: Pool) -> tuple[Outputs, Callable[[], Any]]:
    """Run the forward once (this compiles kernels and creates library handles), then capture it.

    Returns:
        The captured outputs and the function that replays them.

    Raises:
        CaptureUnavailable: if an earlier capture failed. Other exceptions of the forward or of torch pass through.
    """
    global _underway
    with _capture_lock, on(pool.device):
        if _failed:
            raise CaptureUnavailable("an earlier capture failed")
        module = runtime(pool.device)
        forward()
        module.current_stream(pool.device).synchronize()
        if module.mem_get_info(pool.device)[0] < LEAST_FREE:
            module.empty_cache()
        pool.open()
        try:
            _underway = True
            return _record(forward, pool)
        finally:
            _underway = False


def _record(forward: Callable[[], Outputs], pool: Pool) -> tuple[Outputs, Callable[[], Any]]:
    module = runtime(pool.device)
    graph = module.CUDAGraph()
    _clear_workspaces()
    # Don't use torch.cuda.graph: it synchronizes the whole device, releases all caches, and leaves its stream
    # current if ending the capture fails.
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
    """Turn garbage collection off: destroying a graph on this thread would end the capture."""
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _final() -> Iterator[None]:
    """Capture no more graphs in this process if the block raises."""
    global _failed
    try:
        yield
    except BaseException:  # Ctrl-C too: it may come after the capture has started
        _failed = True
        raise


def _clear_workspaces() -> None:
    """Make cuBLAS allocate its workspace in the graph's own pool, and drop it after the capture."""
    # A workspace outside the pool, or shared by several graphs, would be freed with the first graph and still be
    # written by the others. Torch before 2.10 doesn't protect workspaces from matrix products of other threads,
    # and its graphs don't free workspaces.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None and torch.__version__ >= "2.10":
        clear()


@contextmanager
def waits_refused(device: torch.device) -> Iterator[None]:
    """Make every wait for the device raise, in all threads: torch's sync debug mode is process-wide.

    Captures in other threads wait until the block ends. Use this only if `refuses_waits` is true.
    """
    module = runtime(device)
    with _capture_lock:
        before = module.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                # torch warns that it doesn't detect every wait; a missed one makes the capture fail.
                warnings.simplefilter("ignore")
                module.set_sync_debug_mode("error")
            yield
        finally:
            module.set_sync_debug_mode(before)
