"""The torch reference of kernels/triton/linear.py; imports no triton.

Contract: the same arguments and result, for any number of rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
    out = F.linear(x, weight)
    if gate:
        half = out.shape[-1] // 2
        out = F.silu(out[..., :half]) * out[..., half:]
    return out if residual is None else out + residual
