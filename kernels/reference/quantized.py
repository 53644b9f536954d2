"""Weights in four and eight bits: their forms, how they are made, and the torch reference of products.

Contract: a `QuantizedWeight` stands for a float32 matrix [out, in], which `dequantise` gives. A float16 scale and
an integer multiply exactly in float32, so an element of a block is rounded at most once. Nothing writes to a
weight's tensors. Non-goals: GGUF's other forms.
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

    int8: values int8 [out, in]; scales float32 [out]; w = scale * value.
    q8_0: values int8 [out, in]; scales float16 [out, in / 32]; w = scale * value.
    q4_1: values uint8 [out, in / 32, 16], where byte j holds element j of its block in the low four bits and
        element j + 16 in the high four; scales float16 [out, in / 32, 2], d and m; w = d * value + m.
    """

    kind: str
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.values.shape[1] * (BLOCK if self.kind == "q4_1" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        """Itself: it never changes, so copies of a model share it."""
        return self


def dequantise(weight: QuantizedWeight) -> Tensor:
    """The float32 matrix [out, in] that the weight stands for."""
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
    """x W^T + bias for x [..., in] of any float dtype; multiplied in float32, returned [..., out] in x's dtype."""
    out = F.linear(x.float(), dequantise(weight), None if bias is None else bias.float())
    return out.to(x.dtype)


def in_bytes(x: Tensor) -> Tensor:
    """x [..., in] as kernels/cpu multiplies it by quantised weights, float32.

    Each block of 32 numbers becomes signed bytes, rounded to nearest even, times max |x| / 127; 0 where all are
    below 2^-100.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    values = (blocks * torch.where(most < 2**-100, 0, 127 / most)).round()
    return (values * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def take_rows(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight:
    """The outputs `rows`, int64 [n], in that order: [n, in]; exact."""
    return QuantizedWeight(weight.kind, weight.values[rows], weight.scales[rows])


def embedding(ids: Tensor, table: QuantizedWeight) -> Tensor:
    """float32 [..., in]: the rows `ids`, int64 of any shape, of an embedding table [out, in]."""
    return dequantise(take_rows(table, ids.flatten())).view(*ids.shape, table.shape[1])


def quantise_int8(weight: Tensor) -> QuantizedWeight:
    """int8 with a symmetric scale a row: scale = max |w| / 127, value = round(w / scale)."""
    weight = _checked(weight, 1)
    scales = weight.abs().amax(1) / 127
    return QuantizedWeight("int8", _rounded(weight, scales[:, None], -127, 127).to(torch.int8), scales)


def quantise_q8_0(weight: Tensor) -> QuantizedWeight:
    """GGUF's Q8_0: a block of 32 has d = max |w| / 127 in float16; values are rounded with the stored d."""
    blocks = _checked(weight, BLOCK).unflatten(1, (-1, BLOCK))
    scales = _half(blocks.abs().amax(2) / 127)
    values = _rounded(blocks, scales.float()[..., None], -127, 127).to(torch.int8)
    return QuantizedWeight("q8_0", values.flatten(1), scales)


def quantise_q4_1(weight: Tensor) -> QuantizedWeight:
    """GGUF's Q4_1: a block of 32 has m = min w and d = (max w - m) / 15, float16; rounded with the stored ones."""
    blocks = _checked(weight, BLOCK).unflatten(1, (-1, BLOCK))
    least = blocks.amin(2)
    scales = _half(torch.stack(((blocks.amax(2) - least) / 15, least), dim=2))
    d, m = scales.float()[..., None].unbind(2)
    low, high = _rounded(blocks - m, d, 0, 15).to(torch.uint8).chunk(2, dim=2)
    return QuantizedWeight("q4_1", low | high << 4, scales)


QUANTISERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantise_int8,
    "q8_0": quantise_q8_0,
    "q4_1": quantise_q4_1,
}


def _checked(weight: Tensor, multiple: int) -> Tensor:
    """The weight [out, in] in float32; ValueError unless it consists of whole blocks of finite numbers."""
    if weight.dim() != 2 or not weight.numel() or weight.shape[1] % multiple:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} is not made of blocks of {multiple} inputs")
    if not torch.isfinite(weight).all():
        raise ValueError("a weight holds numbers that are not finite")
    return weight.detach().float()


def _half(scales: Tensor) -> Tensor:
    """The scales in float16; ValueError where that can't hold them."""
    halves = scales.half()
    if not torch.isfinite(halves).all():
        raise ValueError("a weight is too large for blocks with float16 scales")
    return halves


def _rounded(weight: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """weight / scales to the nearest integer within the bounds; 0 where the scale is 0."""
    return (weight / scales.masked_fill(scales == 0, torch.inf)).round_().clamp_(least, most)
