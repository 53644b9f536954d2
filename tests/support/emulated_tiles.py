"""AMX's tiles emulated, so that code for them runs on any CPU.

While `emulate` is in effect, compiled tile instructions are calls to the functions below. As on a CPU, each
thread has its own tiles. An instruction that would fault is noted in `faults`.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from llvmlite import ir

from kernels.cpu.kinds import LONG, count, function
from kernels.reference.tiles import add_step

faults: list[str] = []


class _Tiles(threading.local):
    """A thread's tiles: `shapes` has the rows and the bytes per row of each, `data` their bytes."""

    def __init__(self) -> None:
        self.shapes, self.data = [(0, 0)] * 8, np.zeros((8, 16, 64), np.uint8)


_tiles = _Tiles()


def _ldtilecfg(address: int) -> None:
    config = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
    rows, row_bytes = config[48:56].tolist(), config[16:32].view(np.uint16).tolist()
    if config[0] != 1 or config[1:16].any() or config[32:48].any() or config[56:].any():
        faults.append("reserved bytes of a configuration are set")
    if not all(1 <= n <= 16 and 1 <= size <= 64 for n, size in zip(rows, row_bytes, strict=True)):
        faults.append(f"tiles of {rows} rows with {row_bytes} bytes")
    _tiles.shapes = list(zip(rows, row_bytes, strict=True))
    _tiles.data[:] = 0


def _tilerelease() -> None:
    _tiles.__init__()  # type: ignore[misc]


def _tilezero(tile: int) -> None:
    _tiles.data[tile] = 0


def _tileloadd64(tile: int, address: int, stride: int) -> None:
    rows, size = _tiles.shapes[tile]
    _tiles.data[tile] = 0
    for row in range(rows):
        _tiles.data[tile, row, :size] = np.frombuffer(ctypes.string_at(address + row * stride, size), np.uint8)


def _tilestored64(tile: int, address: int, stride: int) -> None:
    rows, size = _tiles.shapes[tile]
    for row in range(rows):
        ctypes.memmove(address + row * stride, _tiles.data[tile, row, :size].tobytes(), size)


def _tdpbf16ps(sums: int, first: int, second: int) -> None:
    (rows, size), (first_rows, first_size), second_shape = (_tiles.shapes[i] for i in (sums, first, second))
    if not rows or (first_rows, second_shape) != (rows, (first_size // 4, size)):
        faults.append(f"a product of tiles with the shapes {_tiles.shapes}")
        return
    a, b = (torch.from_numpy(_tiles.data[i].copy()).view(torch.bfloat16).double() for i in (first, second))
    # b has pairs of inputs in its rows: [pairs, columns, 2].
    weights = b.view(16, 16, 2)[: first_size // 4, : size // 4].transpose(0, 1).flatten(1)
    total = torch.from_numpy(_tiles.data[sums, :rows, :size].copy()).view(torch.float32)
    new = add_step(total, a[:rows, : first_size // 2], weights)
    _tiles.data[sums, :rows, :size] = new.contiguous().numpy().view(np.uint8)


_FUNCTIONS = {
    "ldtilecfg": (_ldtilecfg, 1), "tilerelease": (_tilerelease, 0), "tilezero": (_tilezero, 1),
    "tileloadd64": (_tileloadd64, 3), "tilestored64": (_tilestored64, 3), "tdpbf16ps": (_tdpbf16ps, 3),
}  # fmt: skip
# Keeps the callbacks alive.
_callbacks = {
    name: ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * arguments)(call)
    for name, (call, arguments) in _FUNCTIONS.items()
}


def _tile_call(b: Any, name: str, *args: Any) -> None:
    """Replace `tile_call` of kernels/cpu/tiles.py: call the function of this instruction."""
    operands = [count(arg) if isinstance(arg, int) else arg for arg in args]
    b.call(function(b, f"emulated_{name}", ir.VoidType(), *[LONG] * len(operands)), operands)


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Let code that is compiled from now on use emulated tiles."""
    for name, callback in _callbacks.items():
        llvm.add_symbol(f"emulated_{name}", ctypes.cast(callback, ctypes.c_void_p).value)
    for module in ("tiles", "attention.tiled"):
        patch.setattr(f"kernels.cpu.{module}.tile_call", _tile_call)
    faults.clear()
