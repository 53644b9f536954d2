"""Weights in four and eight bits: their formats, how to make them, and the torch reference of their products.

A `QuantizedWeight` represents a float32 matrix [out, in], which `dequantise` returns. A float16 scale times an
integer is exact in float32, so an element is rounded at most once. Nothing writes to a weight's tensors.
Other GGUF formats are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Inputs that share a scale in q8_0 and q4_1, as in GGUF.
BLOCK = 32


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] of one of three kinds.

    Attributes:
        kind: "int8" (w = scale * value), "q8_0" (the same) or "q4_1" (w = d * value + m).
        values: int8 [out, in] for int8 and q8_0. For q4_1 uint8 [out, in / 32, 16]: byte j holds element j of its
            block in the low four bits and element j + 16 in the high four.
        scales: float32 [out] for int8, float16 [out, in / 32] for q8_0, float16 [out, in / 32, 2] for q4_1: d and
            m.
    """

    kind: str
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in)."""
        return self.values.shape[0], self.values.shape[1] * (BLOCK if self.kind == "q4_1" else 1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        """Return itself: it never changes, so copies of a model share it."""
        return self


def dequantise(weight: QuantizedWeight) -> Tensor:
    """Return the float32 matrix [out, in] that the weight represents."""
    rows, size = weight.shape
    if weight.kind == "int8":
        return weight.values.float() * weight.scales[:, None]
    if weight.kind == "q8_0":
        blocks = weight.values.view(rows, size // BLOCK, BLOCK).float() * weight.scales.float()[..., None]
    else:
        d, m = weight.scales.float()[..., None].unbind(2)
        blocks = torch.cat((weight.values & 15, weight.values >> 4), dim=2).float() * d + m
    return blocks.view(rows, size)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias as [..., out] in x's dtype, multiplied in float32; x [..., in] of any float dtype."""
    out = F.linear(x.float(), dequantise(weight), None if bias is None else bias.float())
    return out.to(x.dtype)


def in_bytes(x: Tensor, block: int = BLOCK) -> Tensor:
    """Round x [..., in] to bytes as kernels/cpu does before products with quantised weights; float32.

    Each block of 32 numbers becomes signed bytes, rounded to nearest even, times max |x| / 127. A block whose
    numbers are all below 2^-100 becomes 0. `block` is another number of inputs that share a scale.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    values = (blocks * torch.where(largest < 2**-100, 0, 127 / largest)).round()
    return (values * (largest / 127)).flatten(-2)[..., : x.shape[-1]]


def take_rows(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight:
    """Return the outputs `rows` (int64 [n]) in that order as a weight [n, in]; exact."""
    return QuantizedWeight(weight.kind, weight.values[rows], weight.scales[rows])


def embedding(ids: Tensor, table: QuantizedWeight) -> Tensor:
    """Return rows `ids` of an embedding table [out, in]: float32 [..., in] for int64 ids [...]."""
    return dequantise(take_rows(table, ids.flatten())).view(*ids.shape, table.shape[1])


def quantise_int8(weight: Tensor) -> QuantizedWeight:
    """Quantise to int8 with a symmetric scale per row: scale = max |w| / 127, value = round(w / scale)."""
    weight = _checked(weight, 1)
    scales = weight.abs().amax(1) / 127
    return QuantizedWeight("int8", _rounded(weight, scales[:, None], -127, 127).to(torch.int8), scales)


def quantise_q8_0(weight: Tensor) -> QuantizedWeight:
    """Quantise to GGUF's Q8_0: each block of 32 has d = max |w| / 127 in float16.

    Values are rounded with the stored, rounded d.
    """
    blocks = _checked(weight, BLOCK).unflatten(1, (-1, BLOCK))
    scales = _half(blocks.abs().amax(2) / 127)
    values = _rounded(blocks, scales.float()[..., None], -127, 127).to(torch.int8)
    return QuantizedWeight("q8_0", values.flatten(1), scales)


def quantise_q4_1(weight: Tensor) -> QuantizedWeight:
    """Quantise to GGUF's Q4_1: each block of 32 has m = min w and d = (max w - m) / 15 in float16.

    Values are rounded with the stored, rounded d and m.
    """
    blocks = _checked(weight, BLOCK).unflatten(1, (-1, BLOCK))
    lowest = blocks.amin(2)
    scales = _half(torch.stack(((blocks.amax(2) - lowest) / 15, lowest), dim=2))
    d, m = scales.float()[..., None].unbind(2)
    low, high = _rounded(blocks - m, d, 0, 15).to(torch.uint8).chunk(2, dim=2)
    return QuantizedWeight("q4_1", low | high << 4, scales)


QUANTISERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantise_int8,
    "q8_0": quantise_q8_0,
    "q4_1": quantise_q4_1,
}


def _checked(weight: Tensor, multiple: int) -> Tensor:
    """Return the weight [out, in] in float32; raise ValueError unless it has whole blocks of finite numbers."""
    if weight.dim() != 2 or not weight.numel() or weight.shape[1] % multiple:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} is not made of blocks of {multiple} inputs")
    if not torch.isfinite(weight).all():
        raise ValueError("a weight holds numbers that are not finite")
    return weight.detach().float()


def _half(scales: Tensor) -> Tensor:
    """Return the scales in float16; raise ValueError if they overflow."""
    halves = scales.half()
    if not torch.isfinite(halves).all():
        raise ValueError("a weight is too large for blocks with float16 scales")
    return halves


def _rounded(weight: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    """Return weight / scales rounded to the nearest integer within the bounds; 0 if the scale is 0."""
    return (weight / scales.masked_fill(scales == 0, torch.inf)).round_().clamp_(lowest, highest)
