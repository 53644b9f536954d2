"""The torch reference of kernels/triton/linear.py and kernels/triton/linear_int8.py; imports no triton.

Contract: the same arguments and result, for any number of rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def _finished(out: Tensor, gate: bool, residual: Tensor | None) -> Tensor:
    """What follows the product: silu(gate) * up, and adding the residual."""
    if gate:
        half = out.shape[-1] // 2
        out = F.silu(out[..., :half]) * out[..., half:]
    return out if residual is None else out + residual


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """act(norm(x) W^T) + residual: see kernels/triton/linear.py."""
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm, eps)
    return _finished(F.linear(x, weight), gate, residual)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """act((norm(x) Q^T) * scale) + residual: see kernels/triton/linear_int8.py. Converts the whole weight."""
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm, eps)
    return _finished(F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype), gate, residual)
