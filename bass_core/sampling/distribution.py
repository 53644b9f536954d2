"""From logits to the distribution that is sampled, and a draw from it.

Contract: temperature, top-k and top-p are applied once, in float32, alike for target and draft, before any
ratio or residual is formed. At temperature 0 the distribution is one-hot on the largest logit, and below
COLDEST too, where a float32 could not hold what is divided. Non-goals: repetition penalties and other processors
that read the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.support import available, is_accelerator

from ..errors import RequestError
from .noise import exponentials

# A CPU sorts a whole vocabulary ten times slower than it finds this many of its largest values.
_NUCLEUS_PREFIX = 1024
# The smallest temperature that is drawn with, vLLM's bound.
COLDEST = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """temperature >= 0 (greedy below COLDEST), top_k >= 0 (0 = off), 0 < top_p <= 1; else a RequestError."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not _number(self.temperature) or self.temperature < 0:
            raise RequestError(
                f"temperature must be a number of at least 0 (0 is greedy); got {self.temperature!r}."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number of at least 0 (0 turns it off); got {self.top_k!r}.")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1 (1 turns it off); got {self.top_p!r}.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < COLDEST


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def argmax(values: Tensor) -> Tensor:
    """The lowest index of the largest of values [..., V]: int64 [...].

    On a CPU numpy takes a tenth of the time that torch 2.13 does: 0.4 ms instead of 3.8 for 40 vocabularies.
    """
    if values.is_cpu and values.dtype == torch.float32 and values.dim() > 1:
        return torch.from_numpy(values.detach().numpy().argmax(-1))
    return values.argmax(-1)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled: float32, shape and support of `logits` [..., V], rows sum to 1."""
    if params.greedy:
        one_hot = torch.zeros_like(logits, dtype=torch.float32)
        return one_hot.scatter_(-1, argmax(logits)[..., None], 1.0)
    scaled = logits.float()
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(params.temperature)
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    probs = torch.softmax(scaled, dim=-1)
    return probs if params.top_p == 1 else _nucleus(probs, params.top_p)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens until their mass reaches top_p (Holtzman et al. 2020), the crossing one too.

    Tokens exactly as likely as the crossing one stay as well, so that the result never depends on a sort's order.
    """
    filtered = probs.masked_fill(probs < _threshold(probs, top_p), 0.0)
    return filtered / filtered.sum(-1, keepdim=True)


def _threshold(probs: Tensor, top_p: float) -> Tensor:
    """The least probability that is kept: [..., 1]."""
    accelerator, size = is_accelerator(probs.device), probs.shape[-1]
    if accelerator and available(probs.device):
        from ..verification.rejection_triton import threshold_on_device  # imports triton

        return threshold_on_device(probs, top_p)
    few = size if accelerator else min(size, _NUCLEUS_PREFIX)
    ordered = probs.topk(few, dim=-1).values
    mass = ordered.cumsum(-1)
    if few < size and bool((mass[..., -1] < top_p).any()):
        ordered = probs.sort(dim=-1, descending=True).values
        mass = ordered.cumsum(-1)
    kept = (mass - ordered < top_p).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, kept - 1)


def draw(
    weights: Tensor, seed: int, sequence_ids: Tensor, positions: Tensor, streams: Tensor, ids: Tensor | None = None
) -> Tensor:
    """One column a key of weights [..., V] (need not be normalised), by Gumbel-max: int64 [...].

    argmax(log w + Gumbel) is computed as argmax(w / exponential), the same order with one logarithm less. Two
    draws from one key with the same weights give the same token, and tokens of weight 0 are never drawn. `ids`
    int64 [V] are the tokens that the columns stand for, where that is not 0..V-1; `streams` are noise.py's.
    """
    if is_accelerator(weights.device) and available(weights.device):
        from ..verification.rejection_triton import draw_on_device  # imports triton

        return draw_on_device(weights, seed, sequence_ids, positions, streams, ids)
    tokens = weights.shape[-1] if ids is None else ids
    noise = exponentials(seed, sequence_ids, positions, streams, tokens)
    return argmax(weights / noise)
