"""The kernels of this folder, called with tensors.

Contract: contiguous float32 rows on the CPU; results never depend on the number of rows or of threads. A few rows
are left to this thread: waking another one takes as long as they do. `compile_all` makes sure that none of them is
compiled while a clock runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calls.pool import run
from ..calls.threads import state_of, watch
from . import draws, noise
from . import excess as over
from . import softmax as soft

# Numbers from which on other threads are asked: ten vocabularies of 49,152, 0.3 ms of work.
_LEAST_SHARED = 10 * 49_152
_NONE = np.empty(0, np.int64)


def _call(kernel: Any, phases: int, numbers: int, *arguments: Any) -> None:
    if numbers < _LEAST_SHARED:
        kernel(state_of(phases), 1, *arguments)
    else:
        run(kernel, phases, *arguments)


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension [..., V], V > 0; NaN where a row is unsound.

    temperature: at most 2**126, whose reciprocal float32 still holds; above it, -inf times 0 would be NaN.
    """
    size, out = logits.shape[-1], torch.empty_like(logits)
    room = logits.numel() // size * -(-size // soft.CHUNK)
    tops, sums = np.empty(room, np.float32), np.empty(room, np.float64)
    source, target = logits.detach().view(-1).numpy(), out.view(-1).numpy()
    _call(soft.softmax, 3, logits.numel(), source, size, np.float32(1 / temperature), target, tops, sums)
    return out


def draw(weights: Tensor, first: Tensor, second: Tensor, tokens: Tensor | None) -> Tensor:
    """The column of the largest weight / exponential in each row of weights [..., V], V > 0: int64 [...].

    first, second int64 [...]: two words of the hash of each row's key; tokens int64 [V]: what columns stand for.
    """
    shape, size = weights.shape[:-1], weights.shape[-1]
    rows, chunks = shape.numel(), -(-size // draws.CHUNK)
    scores, places = np.empty((rows, chunks), np.float32), np.empty((rows, chunks), np.int64)
    source = weights.detach().view(-1).numpy()
    given = _NONE if tokens is None else tokens.contiguous().numpy()
    keys = (word.reshape(-1).contiguous().numpy() for word in (first, second))
    _call(
        draws.draw, 1, weights.numel(), source, size, given, tokens is not None, *keys,
        scores.reshape(-1), places.reshape(-1),
    )  # fmt: skip
    best = scores.argmax(-1) if rows else np.empty(0, np.int64)
    return torch.from_numpy(places[np.arange(rows), best]).view(shape)


def words(seed: int, sequences: Tensor, positions: Tensor, streams: Tensor) -> tuple[Tensor, ...]:
    """The four hash words of each key, int64, in the shape of the int64 arguments, which is one."""
    keys = [bits.reshape(-1).contiguous().numpy() for bits in (sequences, positions, streams)]
    out = torch.empty(4, sequences.numel(), dtype=torch.int64)
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    noise.words(signed, keys[0], keys[1], keys[2], out.numpy())
    return tuple(word.view(sequences.shape) for word in out)


def excess(reach: Tensor, p: Tensor, q: Tensor, num_drafted: Tensor) -> Tensor:
    """The sum over x of max(reach_i p_i(x) - q_i(x), 0) after each draft i but a row's last: float32 [B, l - 1].

    reach [B, l+1], p [B, l+1, V], q [B, l, V], l >= 2; num_drafted int64 [B]; 0 from a row's last draft on.
    """
    (rows, width, size), chunks = q.shape, -(-q.shape[2] // over.CHUNK)
    sums = np.empty((rows, width - 1, chunks), np.float64)
    flat = (tensor.detach().contiguous().view(-1).numpy() for tensor in (p, q))
    counts, factors = num_drafted.contiguous().numpy(), reach.contiguous().view(-1).numpy()
    _call(over.excess, 1, q.numel(), *flat, size, width, counts, factors, sums.reshape(-1))
    return torch.from_numpy(sums.sum(-1).astype(np.float32))


def compile_all() -> None:
    """Compile these kernels, and what helpers wait with, or load their code from disk; each has one signature."""
    key, rows = torch.zeros(1, dtype=torch.int64), torch.ones(1, 3, 1)
    first, second, _, _ = words(0, key, key, key)
    draw(rows[:, 0], first, second, None)
    excess(rows[..., 0], softmax(rows, 1.0), rows[:, 1:], key)
    watch(np.zeros(1, np.int64), -1)
