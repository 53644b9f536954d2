"""The torch reference of kernels/triton/linear.py, for any number of rows; imports no triton."""

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
    """Return act(norm(x) W^T) + residual, with the arguments of kernels/triton/linear.py."""
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm, eps)
    out = F.linear(x, weight)
    if gate:
        half = out.shape[-1] // 2
        out = F.silu(out[..., :half]) * out[..., half:]
    return out if residual is None else out + residual
