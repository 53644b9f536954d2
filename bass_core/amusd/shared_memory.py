"""Memory that target and draft share: float tensors, indexed by row and place.

Contract: `write` and `read` take any number of rows and places at once, so that a step costs one gather and one
copy. What is written before a message is sent can be read once the message is received. An `Arena` is shared by
two processes as an anonymous mapping without a name in any file system, so nothing is left when the last process
that maps it ends, however it ends. Its maker sends its `fd` to the other process. A `LocalArena` is shared within
one process, on the device of target and draft, and its data stay on that device. amusd/messages.py says who may
write which part, and when. Non-goals: locks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime

from ..machine.transfer import to_device, to_host

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Arena:
    """`arena[name]` is a tensor of the layout's shape and dtype, zeros at first. `fd` None makes a new mapping."""

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        total = max(sum(sizes.values()), mmap.PAGESIZE)
        self.fd = _anonymous(total) if fd is None else fd
        memory = mmap.mmap(self.fd, total)
        self._tensors: dict[str, Tensor] = {}
        offset = 0
        for name, (shape, dtype) in layout.items():
            if count := prod(shape):
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
                self._tensors[name] = flat.view(shape)
            offset += sizes[name]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def write(self, name: str, rows: list[int], places: list[int], values: Tensor) -> None:
        """Write values [n, ...] of any device to `self[name][rows[i], places[i]]`; done on return."""
        self[name][torch.tensor(rows), torch.tensor(places)] = to_host(values.to(self[name].dtype))

    def read(self, name: str, rows: list[int], places: list[int], device: torch.device) -> Tensor:
        """A copy [n, ...] of `self[name][rows[i], places[i]]` on the device."""
        shared = self[name].flatten(0, 1)
        index = torch.tensor(rows) * self[name].shape[1] + torch.tensor(places)
        # From pinned memory, the copy to the device need not wait until the stream is idle.
        found = torch.empty(len(rows), *shared.shape[1:], dtype=shared.dtype, pin_memory=device.type == "cuda")
        return torch.index_select(shared, 0, index, out=found).to(device, non_blocking=True)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays as long as the tensors."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LocalArena(Arena):
    """An arena within one process, on the device that target and draft share.

    On an accelerator the two work on streams of their own. Each use of a tensor waits, by events, for the uses
    before it, and the host queues one use at a time; so what a message refers to is there, as between processes.
    The memory belongs to the maker's stream: whoever used it on another must wait for that one before freeing it.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.fd, self.device, self._lock = -1, device, threading.Lock()
        self._tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()
        }
        # By name: an event after the newest write (at first the zeros), and one after the newest read.
        self._written: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        if is_accelerator(device):
            for name in layout:
                self._written[name], self._read[name] = (runtime(device).Event() for _ in range(2))
                self._written[name].record(runtime(device).current_stream(device))

    def write(self, name: str, rows: list[int], places: list[int], values: Tensor) -> None:
        """As Arena's, in stream order: the host does not wait, and nothing is copied to the host."""
        index = to_device(rows, self.device), to_device(places, self.device)
        with self._turn(name, self._written):
            self[name][index] = values.to(self[name].dtype)

    def read(self, name: str, rows: list[int], places: list[int], device: torch.device) -> Tensor:
        """As Arena's; `device` is the arena's own."""
        index = to_device(rows, device), to_device(places, device)
        with self._turn(name, self._read):
            return self[name][index]

    @contextmanager
    def _turn(self, name: str, done: dict[str, Any]) -> Iterator[None]:
        """Order a use of a tensor on the current stream after all earlier ones; record its event in `done`."""
        with self._lock:
            if not done:
                yield
                return
            stream = runtime(self.device).current_stream(self.device)
            stream.wait_event(self._written[name])
            stream.wait_event(self._read[name])
            yield
            done[name].record(stream)


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("bass-amusd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
