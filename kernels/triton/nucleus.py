"""The smallest probability that top-p keeps, found without sorting.

`threshold` returns the same as `_threshold` in bass_core/sample/distribution.py, the torch reference: the smallest
probability for which all more likely tokens together have less than top_p. One program per row tries eight
candidates per pass over the vocabulary, and finds it in about ten passes. Nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import why_unavailable
from .launch import launch

BLOCK_V = 1024
WARPS = 8


@triton.jit
def least_kept(probs, out, vocab, top_p, BLOCK_V: tl.constexpr):
    """Find the threshold of row r of probs float32 [R, V] in program r, by searching over bit patterns.

    Bit patterns of numbers in [0, 1], read as integers, have the same order as the numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    # Search for the smallest number above which the mass is less than top_p; 0x3F800000 is 1.0.
    low = tl.program_id(0) * 0
    high = low + 0x3F800000
    while low < high:
        step = (high - low + 7) // 8
        tried = tl.minimum(low + tl.arange(0, 8) * step, high)
        mass = tl.zeros([8, BLOCK_V], tl.float32)
        for start in range(0, vocab, BLOCK_V):
            token = start + tl.arange(0, BLOCK_V)
            p = tl.load(probs + row * vocab + token, mask=token < vocab, other=0.0)
            likelier = p.to(tl.int32, bitcast=True)[None, :] > tried[:, None]
            mass += tl.where(likelier, p[None, :], 0.0)
        # A mass of 0 counts as less than top_p, even if float32 rounds top_p to 0.
        mass_above = tl.sum(mass, 1)
        short = (mass_above < top_p) | (mass_above == 0.0)
        high = tl.min(tl.where(short, tried, high), 0)
        low = tl.max(tl.where(short, low, tried + 1), 0)
    tl.store(out + row + tl.arange(0, 1), (low + tl.zeros([1], tl.int32)).to(tl.float32, bitcast=True))


def threshold(probs: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability float32 [..., 1] that top_p keeps of probs float32 [..., V]."""
    reason = why_unavailable(probs.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    out = torch.empty(*probs.shape[:-1], 1, device=probs.device)
    if out.numel():
        vocab = probs.shape[-1]
        launch(least_kept, (out.numel(),), probs.contiguous(), out, vocab, top_p, BLOCK_V=BLOCK_V, num_warps=WARPS)
    return out
