"""Memory that target and draft share: float tensors, by row and place.

Contract: `write` and `read` take any number of rows and places at once, so that a step costs one gather and one
copy. What was written before a message was sent is there when the message is read. An `Arena` lies between two
processes, over an anonymous mapping that has no name in any file system: nothing is left when the last process
that maps it ends, however it ends. Whoever makes one sends its `fd`. A `LocalArena` lies within one process, on
the device of target and draft: nothing leaves that. Who may write which part, and when, is said in
amusd/messages.py. Non-goals: locks.
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
        """values [n, ...], on any device, to `self[name][rows[i], places[i]]`; there on return."""
        self[name][torch.tensor(rows), torch.tensor(places)] = to_host(values.to(self[name].dtype))

    def read(self, name: str, rows: list[int], places: list[int], device: torch.device) -> Tensor:
        """A copy [n, ...] of `self[name][rows[i], places[i]]` on the device."""
        shared = self[name].flatten(0, 1)
        index = torch.tensor(rows) * self[name].shape[1] + torch.tensor(places)
        # Gathered in pinned memory the copy need not wait for the stream to run dry.
        found = torch.empty(len(rows), *shared.shape[1:], dtype=shared.dtype, pin_memory=device.type == "cuda")
        return torch.index_select(shared, 0, index, out=found).to(device, non_blocking=True)

    def close_fd(self) -> None:
        """Give the descriptor back; the mapping stays until the tensors go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LocalArena(Arena):
    """An arena within one process, on the device that target and draft share.

    On an accelerator the two queue their work on streams of their own: each use of a tensor waits for those before
    it, by events, and the host queues one use at a time. So what a message speaks of is there, as between
    processes. The memory is the maker's stream's: who used it on another waits for that one before letting it go.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.fd, self.device, self._lock = -1, device, threading.Lock()
        self._tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()
        }
        # By name: behind the newest write, at first the zeros, and behind the newest read.
        self._written: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        if is_accelerator(device):
            for name in layout:
                self._written[name], self._read[name] = (runtime(device).Event() for _ in range(2))
                self._written[name].record(runtime(device).current_stream(device))

    def write(self, name: str, rows: list[int], places: list[int], values: Tensor) -> None:
        """As Arena's, in stream order: the host does not wait, and nothing is copied to it."""
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
        """The current stream's next use of a tensor: behind all before it, and `done` is recorded behind it."""
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
