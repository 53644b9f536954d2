"""Weights as one stream, in the order in which the products read them.

Call `pack` for a plain weight, `pack_quantized` for a quantised one. Rows are padded with zeros to a multiple of
PANEL, inputs to one of STEP; kinds.py has the layout of each format. Packed arrays begin at multiples of 64 bytes
and are never changed.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.quantized import QuantizedWeight
from .kinds import FAST_DOT, PANEL, STEP, block_bytes, columns_of, vectors_of
from .multiply import address_of_kind
from .pages import PAGE, in_large_pages

Array = np.ndarray[Any, Any]
_lock = threading.Lock()


class Line(NamedTuple):
    """Addresses and sizes of a packed matrix, as a tuple or as a row of an int64 array.

    Attributes:
        multiply: address of the compiled product of their kind (multiply.py).
        panels: number of panels of PANEL rows.
        steps: number of steps of STEP inputs.
        scale: address of the rows' float32 scales, or 0.
        bias: address of the rows' float32 biases, or 0.
        panel_bytes: bytes of a panel.
        form: the form of the vectors (AS_FLOATS, AS_PAIRS or AS_BYTES).
    """

    data: int
    multiply: int
    panels: int
    steps: int
    scale: int
    bias: int
    panel_bytes: int
    form: int
    rows: int


NO_LINE = Line(0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Packed:
    """A packed matrix [rows, inputs].

    Attributes:
        form: the format, one of FORMATS (kinds.py).
        dot: whether its bfloat16 products are native.
        scale, bias: float32, one per row, padded like the rows; or None.
    """

    form: str
    dot: bool
    rows: int
    inputs: int
    data: Array
    scale: Array | None = None
    bias: Array | None = None

    @cached_property
    def line(self) -> Line:
        """The addresses and sizes that kernels need."""
        scale, bias = (0 if part is None else part.ctypes.data for part in (self.scale, self.bias))
        steps = -(-self.inputs // STEP)
        return Line(
            data=self.data.ctypes.data,
            multiply=address_of_kind(self.form, self.dot),
            panels=-(-self.rows // PANEL),
            steps=steps,
            scale=scale,
            bias=bias,
            panel_bytes=block_bytes(self.form) * steps,
            form=vectors_of(self.form, self.dot),
            rows=self.rows,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `line`, because a copy has other addresses."""
        return {name: value for name, value in vars(self).items() if name != "line"}

    @property
    def columns(self) -> int:
        """Return the maximum number of vectors that this matrix is multiplied by at once."""
        return columns_of(self.form, self.dot)

    def times(self, factor: float) -> Packed:
        """Return the same weights, with results multiplied by a factor."""
        ones = np.ones(self.line.panels * PANEL, np.float32) if self.scale is None else self.scale
        bias = None if self.bias is None else self.bias * np.float32(factor)
        return replace(self, scale=ones * np.float32(factor), bias=bias)

    @property
    def nbytes(self) -> int:
        """Return how many bytes a product reads."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


def pack(weight: Tensor, bias: Tensor | None = None, *, dot: bool | None = None) -> Packed:
    """Pack a bfloat16 or float16 weight [rows, inputs].

    dot: whether vectors are rounded to bfloat16. By default they are for bfloat16 weights if the CPU has fast
    products of these.
    """
    form = {torch.bfloat16: "bfloat16", torch.float16: "float16"}[weight.dtype]
    dot = FAST_DOT and form == "bfloat16" if dot is None else dot
    rows, inputs = weight.shape
    blocks = _blocks(weight.view(torch.int16), STEP, -(-inputs // STEP)).unflatten(
        3, (-1, 2 if form == "bfloat16" else 1)
    )
    return Packed(form, dot, rows, inputs, _joined(blocks.transpose(2, 3)), bias=_floats(bias, rows))


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> Packed:
    """Pack a quantised weight, whose numbers stay as they are."""
    rows, inputs = weight.shape
    steps, scale, scales = -(-inputs // STEP), None, []
    if weight.kind == "q4_1":
        # Byte j of a block holds inputs j and j + 16; here, byte j of eight inputs holds j and j + 4.
        low, high = weight.values & 15, weight.values >> 4
        plain = torch.cat((low, high), dim=2).view(rows, steps, 4, 2, 4)
        values = _blocks((plain[..., 0, :] | plain[..., 1, :] << 4).flatten(1), STEP // 2, steps)
    else:
        values = _blocks(weight.values.view(torch.uint8) ^ 128, STEP, steps, 128)
    if weight.kind == "int8":
        scale = _floats(weight.scales, rows)
    else:
        scales = [_blocks(part, 1, steps) for part in weight.scales.view(rows, steps, -1).unbind(2)]
    data = _joined(values.unflatten(3, (-1, 4)).transpose(2, 3), *scales)
    return Packed(weight.kind, False, rows, inputs, data, scale, _floats(bias, rows))


def _blocks(part: Tensor, each: int, steps: int, value: int = 0) -> Tensor:
    """Return a part [rows, up to steps x each], padded with `value`, as [panels, steps, PANEL, each]."""
    missing = 0, steps * each - part.shape[1], 0, -len(part) % PANEL
    padded = F.pad(part, missing, value=value) if any(missing) else part
    return padded.view(-1, PANEL, steps, each).transpose(1, 2)


def _joined(*parts: Tensor) -> Array:
    """Join the bytes of each block's parts [panels, steps, ...], one part after another."""
    panels, steps = parts[0].shape[:2]
    sizes = [math.prod(part.shape[2:]) * part.itemsize for part in parts]
    data = _weight_bytes(panels * steps * sum(sizes))
    blocks = torch.from_numpy(data).view(panels, steps, sum(sizes)).split(sizes, dim=2)
    for place, part in zip(blocks, parts, strict=True):
        place.view(part.dtype).view(part.shape).copy_(part)
    return data


def _weight_bytes(size: int) -> Array:
    """Return aligned bytes for weights, cut from shared large pages."""
    with _lock:
        if size > len(_arena.free):
            _arena.free = in_large_pages(max(size, 32 * PAGE))
        taken, _arena.free = _arena.free[:size], _arena.free[-(-size // 64) * 64 :]
    return taken


class _Arena:
    """The part of the newest large pages that no array uses yet. An array keeps its pages alive."""

    free = np.zeros(0, np.uint8)


_arena = _Arena()


def _floats(numbers: Tensor | None, rows: int) -> Array | None:
    """Return the numbers as float32, padded like the rows."""
    if numbers is None:
        return None
    return np.ascontiguousarray(F.pad(numbers.detach().float(), (0, -rows % PANEL)).numpy())
