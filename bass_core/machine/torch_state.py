"""Set the caller's global torch settings aside while we compute.

In a block of `ours`, the default dtype is float32, the default device is the CPU and autocast is off. Afterwards
the caller's settings are back. The default dtype belongs to the whole process: if several blocks are open at once,
the last one to end restores it. Threads, gradients and deterministic algorithms need no block: kernels take any
number of threads, our forwards run in inference mode, and their results are deterministic.

Limit: transformers' `from_pretrained` changes the process's default dtype while it makes a 16-bit model. If a
block begins in another thread meanwhile, it mistakes that dtype for the caller's and may leave it set. So don't
load such a model while another thread generates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
# The open blocks, each with the caller's default dtype before the first of them.
_open: dict[object, torch.dtype] = {}


@contextmanager
def ours() -> Iterator[None]:
    """Give the block torch's initial settings. It decorates functions too; for generators use `stepped`."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        block = object()
        try:
            with _lock:
                _open[block] = before = next(iter(_open.values()), torch.get_default_dtype())
                if len(_open) == 1 and before != torch.float32:
                    torch.set_default_dtype(torch.float32)
            yield
        finally:
            with _lock:
                # Ctrl-C may have come before the block was registered.
                before = _open.pop(block, torch.float32)
                if not _open and before != torch.float32:
                    torch.set_default_dtype(before)


def stepped(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, each computed in a block of `ours` that is closed before the item is yielded."""
    steps = iter(items)
    while True:
        with ours():
            try:
                item = next(steps)
            except StopIteration:
                return
        yield item
