"""`python -m tests.kernels.launching.guard end|start|beyond`: run each launch on tensors next to guard pages.

Every tensor lies directly before ("end") or after ("start") a page without access rights, so a kernel that reads
or writes out of bounds ends the process with a segmentation fault. "beyond" goes out of bounds on purpose, to
test the guard.
Prints the name of each launch before it runs. POSIX only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from kernels.triton import linear
from tests.kernels.launching.launches import LAUNCHES

_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the memory mappings of the guarded tensors alive.
_maps: list[mmap.mmap] = []


def guarded(tensor: Tensor, at_end: bool) -> Tensor:
    """Return a copy with the same strides whose last (or first) byte is next to a page without access rights."""
    if not tensor.numel():
        return tensor
    page, item = mmap.PAGESIZE, tensor.element_size()
    span = item * (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
    inner = -(-span // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    _maps.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for border in (address, address + page + inner):
        if _libc.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(page), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = address + page + (inner - span if at_end else 0)
    flat = torch.frombuffer((ctypes.c_char * span).from_address(start), dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def main(side: str) -> None:
    """Run every launch with guard pages at one side."""
    if side == "beyond":
        x, weight = torch.ones(64), guarded(torch.ones(8, 64), at_end=True)
        tile = linear.tiles(1, 64, gate=False, norm=False, itemsize=4)
        flags = {"NORM": False, "GATE": False, "RESIDUAL": False, "EVEN": False}
        linear.gemv[(2,)](x, weight, x, x, torch.zeros(16), 9, 64, 0.0, **flags, **tile)
        return
    empty: Any = torch.empty
    torch.empty = lambda *size, **options: guarded(empty(*size, **options), side == "end")  # type: ignore[assignment]
    for name, launch in LAUNCHES.items():
        print(name, flush=True)
        launch(lambda tensor: guarded(tensor, side == "end"))


if __name__ == "__main__":
    main(sys.argv[1])
