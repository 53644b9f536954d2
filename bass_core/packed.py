"""Linear layers whose weights are laid out once for the CPU's matrix library.

Contract: `PackedLinear` computes what `torch.nn.Linear` computes, from a copy of the weights. Where the CPU
multiplies bfloat16 natively the copy is bfloat16, elsewhere float32: emulated bfloat16 products cost up to three
times as much from four rows on. In float32 a second, plain copy serves one to three rows, which the packed layout
makes slower. Without oneDNN everything takes the plain way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# From this many rows on the packed layout is the faster one (measured on AVX-512 without bfloat16).
PACKED_ROWS = 4


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
        joined = torch.cat([weight.detach() for weight in weights]).to(self.compute)
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases]).to(self.compute)
        self.packed = _pack(joined)
        keep = self.packed is None or self.compute == torch.float32
        self.plain = joined if keep else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype, plus `residual` where one is given."""
        inputs = x.to(self.compute)
        rows = x.numel() // x.shape[-1]
        if self.plain is not None and (self.packed is None or rows < PACKED_ROWS):
            out = F.linear(inputs, self.plain, self.bias).to(x.dtype)
        elif residual is not None and self.compute == residual.dtype:
            # Naming the overload spares its look-up, 20 microseconds a call.
            call = torch.ops.mkldnn._linear_pointwise.binary
            fused: Tensor = call(inputs, residual, self.packed, self.bias, "add")
            return fused
        else:
            call = torch.ops.mkldnn._linear_pointwise.default
            out = call(inputs, self.packed, self.bias, "none", [], "").to(x.dtype)
        return out if residual is None else out + residual


def _pack(weight: Tensor) -> Tensor | None:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed
