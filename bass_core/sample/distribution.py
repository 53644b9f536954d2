"""From logits to the distribution that is sampled. Start with `probabilities`.

Temperature, top-k, top-p and min-p are applied once, in float32, to target and draft alike, before any ratio or
residual is formed. Top-k selects among the logits themselves, which no temperature can make equal.

Below temperature COLDEST, where float32 can't hold the quotient, the distribution is one-hot on the largest logit;
above HOTTEST it is that of HOTTEST. A logit of -inf has probability 0 at any temperature. A row with NaN or +inf,
or without a finite logit, becomes NaN.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.support import CompileFailed, available, is_accelerator

from ..machine import cpu_kernels
from .params import SamplingParams
from .rows import copied, sums

# How many of the largest values to look at before sorting all. A CPU finds them in a tenth of the time of a full
# sort.
_NUCLEUS_PREFIX = 1024


@dataclass(frozen=True)
class ColumnProbs:
    """Distributions over V tokens with zeros nearly everywhere, stored without most of the zeros.

    Attributes:
        values: float32 [B, N, V'], the probabilities of the tokens that a draft head can propose.
        ids: int64 [V'], those tokens.
        columns: int64 [V], for each token its column in `values`, or -1.
        points: int64 [B, W], or None. A token instead of -1 stands for the point mass on it; W may be more than N.
    """

    values: Tensor
    ids: Tensor
    columns: Tensor
    points: Tensor | None = None

    def with_points(self, points: Tensor) -> ColumnProbs:
        """Return these distributions with point masses at `points`, as in the attribute."""
        return replace(self, points=points)

    def dense(self) -> Tensor:
        """Return the distributions as float32 [B, W, V]."""
        dense = scatter_columns(self.values, self.ids, len(self.columns))
        if self.points is None:
            return dense
        width = self.points.shape[1] - dense.shape[1]
        dense = torch.nn.functional.pad(dense, (0, 0, 0, width))
        rows, places = (self.points >= 0).nonzero(as_tuple=True)
        dense[rows, places] = 0.0
        dense[rows, places, self.points[rows, places]] = 1.0
        return dense


Probs = Tensor | ColumnProbs


def dense(probs: Probs | None) -> Tensor | None:
    """Return distributions [B, N, V] as one tensor."""
    return probs.dense() if isinstance(probs, ColumnProbs) else probs


def argmax(values: Tensor) -> Tensor:
    """Return the lowest index of the largest of values [..., V]: int64 [...]."""
    return largest(values)[0]


def largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest index int64 [...] of the largest of values [..., V], and the value; NaN is the largest."""
    if compiled(values):
        from kernels.cpu.sampling import calls  # imports numba

        return calls.largest(values)
    if values.is_cpu and values.dtype == torch.float32 and values.dim() > 1:
        # numpy takes a tenth of torch's time: for 40 vocabularies 0.4 ms instead of 3.8 ms.
        places = torch.from_numpy(values.detach().numpy().argmax(-1))
    else:
        places = values.argmax(-1)
    return places, values.gather(-1, places[..., None])[..., 0]


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of values [..., V] >= 0, largest first, and their columns int64 [..., count]."""
    if not compiled(values):
        result = values.topk(count, dim=-1)
        return result.values, result.indices
    remaining, shape = copied(values), (*values.shape[:-1], count)
    numbers, columns = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int64)
    for place in range(count):
        columns[..., place], numbers[..., place] = largest(remaining)
        np.put_along_axis(remaining.numpy(), columns[..., place : place + 1].numpy(), -1.0, -1)
    return numbers, columns


def probabilities(logits: Tensor, params: SamplingParams, out: Tensor | None = None) -> Tensor:
    """Return the distribution that is sampled, float32 with the shape of `logits`; rows sum to 1.

    Args:
        logits: [..., V].
        params: temperature and filters.
        out: contiguous; the compiled kernels write here.
    """
    if params.greedy:
        one_hot = torch.zeros_like(logits, dtype=torch.float32)
        return one_hot.scatter_(-1, argmax(logits)[..., None], 1.0)
    scaled = logits.float()
    if compiled(scaled):
        from kernels.cpu.sampling import calls  # imports numba

        return calls.probabilities(scaled, calls.Filters(*filters(params)), out)
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    # Subtract the maximum first, so that a tiny temperature does not overflow.
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(params.divisor)
    probs = torch.softmax(scaled, dim=-1)
    probs = probs if params.top_p == 1 else _nucleus(probs, params.top_p)
    return probs if params.min_p == 0 else _likely(probs, params.min_p)


def filters(params: SamplingParams) -> tuple[float, int, float, float]:
    """Return temperature, top_k, top_p and min_p in the form that the compiled kernels take."""
    return params.divisor, params.top_k, params.top_p, params.min_p


def scatter_columns(q: Tensor, ids: Tensor, size: int) -> Tensor:
    """Spread q [..., V'], whose columns are the tokens `ids` int64 [V'], over `size` columns; 0 elsewhere."""
    if compiled(q):
        from kernels.cpu.sampling import calls  # imports numba

        return calls.scatter_columns(q, ids, size)
    return q.new_zeros(*q.shape[:-1], size).index_copy_(-1, ids, q)


def compiled(rows: Tensor) -> bool:
    """Return whether kernels/cpu/sampling computes these rows [..., V]; this never depends on their number."""
    if is_accelerator(rows.device) or not rows.is_cpu:
        return False
    return rows.dtype == torch.float32 and rows.shape[-1] > 0 and cpu_kernels.available()


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until their mass reaches top_p (Holtzman et al. 2020), including the last."""
    # Tokens exactly as likely as the last one stay as well, so the result never depends on the order of a sort.
    filtered = probs.masked_fill(probs < _threshold(probs, top_p), 0.0)
    return filtered / sums(filtered)


def _likely(probs: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least min_p times as likely as the most likely one (arXiv 2407.01082)."""
    filtered = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    return filtered / sums(filtered)


def _threshold(probs: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability that top-p keeps: [..., 1]."""
    accelerator, size = is_accelerator(probs.device), probs.shape[-1]
    if accelerator and available(probs.device):
        from .draw_triton import threshold_on_device  # imports triton

        with suppress(CompileFailed):
            return threshold_on_device(probs, top_p)
    prefix = size if accelerator else min(size, _NUCLEUS_PREFIX)
    ordered = probs.topk(prefix, dim=-1).values
    mass = ordered.cumsum(-1)
    if prefix < size and bool((mass[..., -1] < top_p).any()):
        ordered = probs.sort(dim=-1, descending=True).values
        mass = ordered.cumsum(-1)
    last = (mass < top_p).sum(-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, last)
