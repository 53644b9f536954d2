"""Measure the time that a thread spends on one-off set-up: capturing a graph, compiling a kernel.

`setup_ms` is a running total. A lane's clock subtracts the increase of `setup_ms` from the time between two CUDA
events. So the device must be idle during set-up: counting starts after the thread's earlier work on the device is
done. Nested set-ups count once. First calls of libraries, which take milliseconds, are not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch

from kernels.support import is_accelerator, runtime


class _Thread(threading.local):
    ms = 0.0
    busy = False
    compiling: float | None = None
    loading: float | None = None


_thread = _Thread()


def setup_ms() -> float:
    """Return the milliseconds that this thread has spent on set-up so far."""
    return _thread.ms


@contextmanager
def setting_up(device: torch.device) -> Iterator[None]:
    """Count the block as set-up, after this thread's earlier work on the device is done."""
    if _thread.busy:
        yield
        return
    _drain(device)
    start = time.perf_counter()
    try:
        _thread.busy = True
        yield
    finally:
        _thread.busy = False
        _add(start)


@cache
def watch_compiler() -> None:
    """Count Triton's compilations as set-up from now on, if the installed Triton has hooks."""
    try:
        knobs = import_module("triton.knobs").runtime
        compiles, compiled = knobs.jit_cache_hook, knobs.jit_post_compile_hook
    except (ImportError, AttributeError):
        return
    knobs.jit_cache_hook = _before(compiles)
    knobs.jit_post_compile_hook = _after(compiled)
    loaded: Any = getattr(knobs, "kernel_load_end_hook", None)
    if hasattr(loaded, "add"):
        loaded.add(_loaded)


def _before(other: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a hook for Triton to call before it compiles. It also calls `other`, the previously set hook."""

    def hook(**facts: Any) -> Any:
        if not _thread.busy:
            # Triton compiles for the current device.
            _drain(torch.device("cuda"))
            _thread.compiling = time.perf_counter()
        return None if other is None else other(**facts)

    return hook


def _after(other: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the hook that Triton calls after compiling.

    Triton then still builds the launcher and loads the code, which `_loaded` counts as well.
    """

    def hook(**facts: Any) -> Any:
        start, _thread.compiling = _thread.compiling, None
        if start is not None:
            _add(start)
            _thread.loading = None if facts.get("is_manual_warmup") else time.perf_counter()
        return None if other is None else other(**facts)

    return hook


def _loaded(*_: Any) -> None:
    start, _thread.loading = _thread.loading, None
    if start is not None:
        _add(start)


def _add(start: float) -> None:
    _thread.ms += 1000 * (time.perf_counter() - start)


def _drain(device: torch.device) -> None:
    """Wait for the thread's current stream; other threads' work goes on."""
    if not is_accelerator(device):
        return
    module = runtime(device)
    # A stream can't be waited for during its capture, e.g. if a capture compiles without a warm-up.
    if not getattr(module, "is_current_stream_capturing", bool)():
        module.current_stream(device).synchronize()
