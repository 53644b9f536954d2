"""Weights as one stream, in the order in which the products read them.

Contract: `pack` makes a `Packed` from a plain weight or from parts of quantised ones. Rows are padded with zeros to
a multiple of ROWS, inputs to one of STEP. The layout of each format: kinds.py. Packed arrays begin at multiples of
64 bytes and are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .kinds import HAS_DOT, ROWS, STEP, block_bytes
from .multiply import address_of_kind


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, inputs]: `data` bytes; scale: float32 [rows] or None; bias: float32 [rows] or None."""

    form: str
    dot: bool
    rows: int
    inputs: int
    data: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any] | None = None
    bias: np.ndarray[Any, Any] | None = None

    def line(self) -> list[int]:
        """What a kernel needs: the address of the data and of the compiled product, groups, steps, the addresses of
        scale and bias or 0, bytes of a block, and whether vectors are bfloat16."""
        extra = [0 if one is None else one.ctypes.data for one in (self.scale, self.bias)]
        groups, steps = -(-self.rows // ROWS), -(-self.inputs // STEP)
        return [
            self.data.ctypes.data, address_of_kind(self.form, self.dot), groups, steps, *extra,
            block_bytes(self.form), int(self.dot),
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


def pack(weight: Tensor, bias: Tensor | None = None, *, dot: bool | None = None) -> Packed:
    """A bfloat16 or float16 weight [rows, inputs]. dot: whether vectors are rounded to bfloat16 (if the CPU can)."""
    form = {torch.bfloat16: "bfloat16", torch.float16: "float16"}[weight.dtype]
    dot = HAS_DOT and form == "bfloat16" if dot is None else dot
    rows, inputs = weight.shape
    padded = weight.view(torch.int16)
    if rows % ROWS or inputs % STEP:
        padded = F.pad(padded, (0, -inputs % STEP, 0, -rows % ROWS))
    data = aligned(padded.numel() * 2)
    blocks = padded.view(-1, ROWS, padded.shape[1] // STEP, STEP).transpose(1, 2)
    torch.from_numpy(data.view(np.int16)).view(blocks.shape).copy_(blocks)
    return Packed(form, dot, rows, inputs, data, bias=_floats(bias, rows))


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Zeroed bytes that begin at a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def _floats(numbers: Tensor | None, rows: int) -> np.ndarray[Any, Any] | None:
    """float32, padded like the rows."""
    if numbers is None:
        return None
    return np.ascontiguousarray(F.pad(numbers.detach().float(), (0, -rows % ROWS)).numpy())
