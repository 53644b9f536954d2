"""What a caller may have set for all of torch, put aside while we compute.

Contract: in a block of `ours` the default dtype is float32, the default device is the CPU and autocast is off.
Each is the caller's again afterwards. The default dtype belongs to the whole process: the last of the blocks that
are open at once puts it back. Threads, gradients and deterministic algorithms need no block: kernels take any
number of threads, our forwards run in inference mode, and their results are deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
# Blocks that are open, and the caller's default dtype.
_open: list[torch.dtype] = []


@contextmanager
def ours() -> Iterator[None]:
    """In this block torch is as it starts. It decorates functions too; for generators there is `stepped`."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        with _lock:
            _open.append(_open[0] if _open else torch.get_default_dtype())
            if len(_open) == 1 and _open[0] != torch.float32:
                torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            with _lock:
                before = _open.pop()
                if not _open and before != torch.float32:
                    torch.set_default_dtype(before)


def stepped(items: Iterable[T]) -> Iterator[T]:
    """The same items, each made in a block of `ours`, which is closed while the caller has one."""
    steps = iter(items)
    while True:
        with ours():
            try:
                item = next(steps)
            except StopIteration:
                return
        yield item
