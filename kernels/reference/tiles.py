"""The sums of AMX's tdpbf16ps in torch, bit for bit: the reference of kernels/cpu/tiles.py on any machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Inputs that one tile instruction multiplies.
_STEP = 32


def tile_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply bfloat16 x [N, inputs] and weight [rows, inputs] as tiles do: float32 [N, rows].

    Of each 32 inputs, the even ones are summed in one chain of float32 additions and the odd ones in another. Then
    the sum of both chains is added to the total. Denormal inputs and results count as zero.
    """
    missing = -x.shape[1] % _STEP
    vectors, weights = (_flushed(F.pad(part.float(), (0, missing))).double() for part in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for first in range(0, vectors.shape[1], _STEP):
        chains = []
        for parity in (0, 1):
            chain = torch.zeros_like(total)
            for i in range(first + parity, first + _STEP, 2):
                # Round once per product, as a fused multiply-add does.
                chain = _flushed((chain.double() + vectors[:, None, i] * weights[:, i]).float())
            chains.append(chain)
        total = _flushed(total + _flushed(chains[0] + chains[1]))
    return total


def _flushed(x: Tensor) -> Tensor:
    """Return x with denormal numbers replaced by zero."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, torch.zeros_like(x), x)
