"""The smallest probability that top-p keeps, found without sorting.

`threshold` returns the same as `_threshold` in bass_core/sample/distribution.py, the torch reference: the smallest
probability for which all more likely tokens together have less than top_p. One program per row narrows an interval
of probabilities until few tokens are in it, and collects these. It usually reads the row twice; the remaining
search reads only the collected tokens, which stay in registers. Nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import capability, why_unavailable
from .launch import launch

# Tokens per block of a pass, and the most tokens that are collected. To try three candidates at once, a thread has
# three partial sums per token. So 32 warps use all of their 64 registers, or spill on capability 10.0 and 12.0; 16
# warps use 110 of 128, and spill on 8.0.
BLOCK_V = 8192


@triton.jit
def narrowed(low, high, above, tried, mass, top_p):
    """Narrow the interval [low, high] by a candidate in it, above which all tokens have this `mass`.

    Returns the interval, and the mass `above` its end.
    """
    # A mass of 0 counts as less than top_p, even if float32 rounds top_p to 0.
    short = (mass < top_p) | (mass == 0.0)
    low = tl.where(short, low, tl.maximum(low, tried + 1))
    return low, tl.where(short, tried, high), tl.where(short, mass, above)


@triton.jit
def between(low, high):
    """Return three numbers that divide the interval from `low` to `high`, itself left out, into quarters."""
    return low + (high - low) // 4, low + (high - low) // 2, high - 1 - (high - low - 1) // 4


@triton.jit(do_not_specialize=["vocab"])
def least_kept(probs, collected, out, vocab, top_p, BLOCK_V: tl.constexpr):
    """Find the threshold of row r of probs float32 [R, V] in program r, by searching over bit patterns.

    Bit patterns of numbers in [0, 1], read as integers, have the same order as the numbers. The threshold is the
    smallest pattern above which the mass is less than top_p. `collected` float32 [R, BLOCK_V] is room for tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    tokens = probs + row * vocab
    # 0x3F800000 is 1.0.
    low = tl.program_id(0) * 0
    high = low + 0x3F800000
    above = low.to(tl.float32)
    # The first candidates are 2**-16, 2**-14 and 2**-12. Fewer than BLOCK_V tokens are above the last one.
    first, second, third = low + 0x37800000, low + 0x38800000, low + 0x39800000
    count = low + vocab
    while (count > BLOCK_V) & (low < high):
        above_first = tl.zeros([BLOCK_V], tl.float32)
        above_second, above_third = above_first, above_first
        for start in range(0, vocab, BLOCK_V):
            token = start + tl.arange(0, BLOCK_V)
            p = tl.load(tokens + token, mask=token < vocab, other=0.0)
            pattern = p.to(tl.int32, bitcast=True)
            above_first += tl.where(pattern > first, p, 0.0)
            above_second += tl.where(pattern > second, p, 0.0)
            above_third += tl.where(pattern > third, p, 0.0)
        # The largest candidate comes first, so the interval ends at the smallest one that has too little above it.
        low, high, above = narrowed(low, high, above, third, tl.sum(above_third, 0), top_p)
        low, high, above = narrowed(low, high, above, second, tl.sum(above_second, 0), top_p)
        low, high, above = narrowed(low, high, above, first, tl.sum(above_first, 0), top_p)
        first, second, third = between(low, high)
        # Collect the tokens of the interval in ascending order, if there is room for all.
        count = low * 0
        for start in range(0, vocab, BLOCK_V):
            token = start + tl.arange(0, BLOCK_V)
            p = tl.load(tokens + token, mask=token < vocab, other=0.0)
            pattern = p.to(tl.int32, bitcast=True)
            inside = ((pattern > low) & (pattern <= high)).to(tl.int32)
            place = count + tl.cumsum(inside, 0) - 1
            tl.store(collected + row * BLOCK_V + place, p, mask=(inside != 0) & (place < BLOCK_V))
            count += tl.sum(inside, 0)
    if vocab > BLOCK_V:
        tokens = collected + row * BLOCK_V
        # Wait until all threads have stored what they collected.
        tl.debug_barrier()
    token = tl.arange(0, BLOCK_V)
    p = tl.load(tokens + token, mask=token < count, other=0.0)
    pattern = p.to(tl.int32, bitcast=True)
    while low < high:
        mass_first = above + tl.sum(tl.where(pattern > first, p, 0.0), 0)
        mass_second = above + tl.sum(tl.where(pattern > second, p, 0.0), 0)
        mass_third = above + tl.sum(tl.where(pattern > third, p, 0.0), 0)
        low, high, _ = narrowed(low, high, above, third, mass_third, top_p)
        low, high, _ = narrowed(low, high, above, second, mass_second, top_p)
        low, high, _ = narrowed(low, high, above, first, mass_first, top_p)
        first, second, third = between(low, high)
    tl.store(out + row + tl.arange(0, 1), (low + tl.zeros([1], tl.int32)).to(tl.float32, bitcast=True))


def threshold(probs: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability float32 [..., 1] that top_p keeps of probs float32 [..., V]."""
    reason = why_unavailable(probs.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    out = torch.empty(*probs.shape[:-1], 1, device=probs.device)
    if out.numel():
        vocab = probs.shape[-1]
        collected = torch.empty(out.numel() if vocab > BLOCK_V else 0, BLOCK_V, device=probs.device)
        launch(
            least_kept, (out.numel(),), probs.contiguous(), collected, out, vocab, top_p,
            BLOCK_V=BLOCK_V, num_warps=16 if capability(probs.device) >= 90 else 32,
        )  # fmt: skip
    return out
