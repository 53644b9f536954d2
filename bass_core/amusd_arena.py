"""Memory that target and draft process share: float tensors over one anonymous mapping.

Contract: the mapping has no name in any file system, so nothing is left when the last process that maps it ends,
however it ends. Whoever makes an arena sends its `fd`; what was written before a message was sent is there when
the message is read. Non-goals: locks. Who may write which part, and when, is said in amusd_link.py.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod

import torch
from torch import Tensor

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

    def close_fd(self) -> None:
        """Give the descriptor back; the mapping stays until the tensors go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("bass-amusd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
