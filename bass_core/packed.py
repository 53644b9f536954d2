"""Linear layers whose weights are laid out once for the CPU's matrix library.

Contract: `PackedLinear` computes what `torch.nn.Linear` computes, float32 in and out, from a copy of the
weights. Where the CPU multiplies bfloat16 natively the copy is bfloat16, elsewhere float32: emulated bfloat16
products cost up to 3 times as much from 4 rows on. Without oneDNN it falls back to `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def matmul_dtype(weights: torch.dtype) -> torch.dtype:
    """The dtype in which this CPU multiplies weights of the given dtype fastest without losing precision."""
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    native = native or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if native and weights == torch.bfloat16 else torch.float32


class PackedLinear(nn.Module):
    """y = x W^T + b, with several layers that read the same input joined into one W ([sum of outs, in])."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        weights = [layer.weight for layer in layers]
        self.compute = matmul_dtype(weights[0].dtype)
        self.out_features = sum(weight.shape[0] for weight in weights)
        joined = torch.cat([weight.detach() for weight in weights]).to(self.compute)
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases]).to(self.compute)
        self.packed = _pack(joined)
        self.plain = joined if self.packed is None else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype."""
        flat = x.reshape(-1, x.shape[-1]).to(self.compute)
        if self.packed is None:
            out = F.linear(flat, self.plain, self.bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


def _pack(weight: Tensor) -> Tensor | None:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    except (AttributeError, RuntimeError, TypeError):
        return None
