"""The sums of AMX's tdpbf16ps in torch, bit for bit: the reference of kernels/cpu/tiles.py on any machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Inputs that one tile instruction multiplies.
_STEP = 32


def tile_linear(x: Tensor, weight: Tensor, step: int = _STEP) -> Tensor:
    """Multiply bfloat16 x [N, inputs] and weight [rows, inputs] as tiles do: float32 [N, rows].

    Each `step` inputs are one instruction (`add_step`).
    """
    missing = -x.shape[1] % step
    vectors, weights = (F.pad(part.double(), (0, missing)) for part in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for first in range(0, vectors.shape[1], step):
        total = add_step(total, vectors[:, first : first + step], weights[:, first : first + step])
    return total


def add_step(total: Tensor, vectors: Tensor, weights: Tensor) -> Tensor:
    """Return float32 total [N, rows] plus the products of float64 vectors [N, inputs] and weights [rows, inputs].

    The even inputs are summed in one chain of float32 additions and the odd ones in another. Then the sum of both
    chains is added to the total. Denormal inputs and results count as zero.
    """
    vectors, weights, chains = _flushed(vectors), _flushed(weights), []
    for parity in (0, 1):
        chain = torch.zeros_like(total)
        for i in range(parity, vectors.shape[1], 2):
            # Round once per product, as a fused multiply-add does.
            chain = _flushed((chain.double() + vectors[:, None, i] * weights[:, i]).float())
        chains.append(chain)
    return _flushed(total + _flushed(chains[0] + chains[1]))


def _flushed(x: Tensor) -> Tensor:
    """Return x with denormal numbers replaced by zero."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, torch.zeros_like(x), x)
