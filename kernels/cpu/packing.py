"""Weights as one stream, in the order in which the products read them.

Contract: `pack` makes a `Packed` from a plain weight or from parts of quantised ones. Rows are padded with zeros
to a multiple of ROWS, inputs to one of STEP. The layout of each format: kinds.py. Packed arrays begin at
multiples of 64 bytes and are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.quantized import QuantizedWeight
from .kinds import HAS_DOT, ROWS, STEP, block_bytes
from .multiply import address_of_kind

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, inputs]: `data` bytes; scale: float32 [rows] or None; bias: float32 [rows] or None."""

    form: str
    dot: bool
    rows: int
    inputs: int
    data: Array
    scale: Array | None = None
    bias: Array | None = None

    def line(self) -> list[int]:
        """What a kernel needs: addresses of the data and of the compiled product, groups, steps, the addresses of
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
    """Pack a bfloat16 or float16 weight [rows, inputs].

    dot: whether vectors are rounded to bfloat16; by default for bfloat16 weights where the CPU can multiply these.
    """
    form = {torch.bfloat16: "bfloat16", torch.float16: "float16"}[weight.dtype]
    dot = HAS_DOT and form == "bfloat16" if dot is None else dot
    rows, inputs = weight.shape
    data = _in_blocks([weight.view(torch.int16)], inputs, STEP)
    return Packed(form, dot, rows, inputs, data, bias=_floats(bias, rows))


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None, *, dot: bool = HAS_DOT) -> Packed:
    """Pack a quantised weight; its numbers stay as they are."""
    rows, inputs = weight.shape
    if weight.kind == "int8":
        data = _in_blocks([weight.values], inputs, STEP)
        return Packed("int8", dot, rows, inputs, data, _floats(weight.scales, rows), _floats(bias, rows))
    scales = weight.scales.view(rows, inputs // STEP, -1)
    parts = [weight.values.flatten(1), *scales.unbind(2)]
    data = _in_blocks(parts, inputs, *(part.shape[1] * STEP // inputs for part in parts))
    return Packed(weight.kind, dot, rows, inputs, data, bias=_floats(bias, rows))


def _in_blocks(parts: list[Tensor], inputs: int, *each: int) -> Array:
    """Bytes [groups][steps] of blocks: each part's ROWS x each[i] numbers of the block, part after part.

    parts[i] is [rows, steps x each[i]], or shorter, padded with zeros.
    """
    rows, steps = len(parts[0]), -(-inputs // STEP)
    blocks = []
    for part, size in zip(parts, each, strict=True):
        padded = (
            F.pad(part, (0, steps * size - part.shape[1], 0, -rows % ROWS)) if _odd(part, steps * size) else part
        )
        blocks.append(padded.view(-1, ROWS, steps, size).transpose(1, 2))
    sizes = [ROWS * block.shape[-1] * block.itemsize for block in blocks]
    data = aligned(len(blocks[0]) * steps * sum(sizes))
    room = torch.from_numpy(data).view(-1, steps, sum(sizes)).split(sizes, dim=2)
    for place, block in zip(room, blocks, strict=True):
        place.view(block.dtype).view(block.shape).copy_(block)
    return data


def _odd(part: Tensor, columns: int) -> bool:
    return bool(len(part) % ROWS) or part.shape[1] != columns


def aligned(size: int) -> Array:
    """Zeroed bytes that begin at a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def _floats(numbers: Tensor | None, rows: int) -> Array | None:
    """float32, padded like the rows."""
    if numbers is None:
        return None
    return np.ascontiguousarray(F.pad(numbers.detach().float(), (0, -rows % ROWS)).numpy())
