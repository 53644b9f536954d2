"""Linear layers and embeddings that hold quantised weights on a CPU.

Contract: each stands in a transformers model for the nn.Linear or nn.Embedding that it was made from, and computes
the same with the weights that its `quantized` means, by kernels/reference/quantized.py: correct and slow, since a
product dequantises the whole weight. `weight` is that matrix, made anew at each reading; use `held` for anything
but its numbers. Nothing of the 16-bit weight is kept. Non-goals: training, save_pretrained, other devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.reference import quantized as reference
from kernels.reference.quantized import QuantizedWeight


class QuantizedModule(nn.Module):
    """A module with a weight [out, in] in quantised form; `dtype` is what it computes in and returns."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized, self.dtype = quantized, dtype

    @property
    def weight(self) -> Tensor:
        """[out, in] in `dtype`, dequantised at each reading."""
        return reference.dequantise(self.quantized).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.quantized.kind} {self.quantized.shape}"


class QuantizedLinear(QuantizedModule):
    """y = x W^T + b; `bias` is an nn.Parameter [out] or None."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(quantized, dtype)
        self.out_features, self.in_features = quantized.shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype."""
        return reference.linear(x, self.quantized, self.bias)


class QuantizedEmbedding(QuantizedModule):
    """The rows that ids name; the weight may be an output layer's too."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(quantized, dtype)
        self.num_embeddings, self.embedding_dim = quantized.shape

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 of any shape; returns [..., embedding_dim] in `dtype`."""
        return reference.embedding(ids, self.quantized).to(self.dtype)


def held(module: Any) -> Tensor | QuantizedWeight:
    """A linear layer's or embedding's weight as it is held: the QuantizedWeight, else the parameter itself.

    Both have a `shape`, and modules that share a weight hold the same object.
    """
    quantized: QuantizedWeight | None = getattr(module, "quantized", None)
    weight: Tensor | QuantizedWeight = module.weight if quantized is None else quantized
    return weight


def look_up(ids: Tensor, table: Tensor | QuantizedWeight) -> Tensor:
    """Rows [..., hidden] of a table [rows, hidden] held in either way; of a quantised one in float32."""
    return F.embedding(ids, table) if isinstance(table, Tensor) else reference.embedding(ids, table)
