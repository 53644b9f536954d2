"""Puts the caller's global torch settings aside while we compute.

Contract: in a block of `ours` the default dtype is float32, the default device is the CPU and autocast is off.
Each is the caller's again afterwards. The default dtype belongs to the whole process: the last of the blocks that
are open at once puts it back. Threads, gradients and deterministic algorithms need no block: kernels take any
number of threads, our forwards run in inference mode, and their results are deterministic.

A limit: transformers' `from_pretrained` changes the default dtype of the process while it makes a 16-bit model. A
block that begins in another thread meanwhile takes that dtype for the caller's and may leave it set. Don't load
such a model while another thread generates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
# The blocks that are open, and the caller's default dtype when the first of them began.
_open: dict[object, torch.dtype] = {}


@contextmanager
def ours() -> Iterator[None]:
    """In this block torch is as it starts. It decorates functions too; for generators there is `stepped`."""
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
                # Ctrl-C may have come before the block was noted.
                before = _open.pop(block, torch.float32)
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
