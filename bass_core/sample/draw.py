"""Draw a token from a distribution, as a function of the noise key.

The same weights and key give the same token on every device. Tokens of weight 0 are never drawn.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels.support import CompileFailed, available, is_accelerator

from .distribution import argmax, compiled
from .noise import exponentials, words


def draw(
    weights: Tensor, seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor, ids: Tensor | None = None
) -> Tensor:
    """Draw one column per key by Gumbel-max: int64 [...].

    argmax(log w + Gumbel) is computed as argmax(w / exponential), which has the same order and saves a logarithm.

    Args:
        weights: [..., V], not necessarily normalised.
        seed: seed of the request, as in NoiseKeys.
        sequence_ids: int64, the key with `positions` and `streams`; they broadcast to [...].
        positions: int64, the position of the token in the text.
        streams: int64, see `noise.stream`.
        ids: int64 [V], the tokens of the columns; None for 0 to V - 1.
    """
    if is_accelerator(weights.device) and available(weights.device):
        from .draw_triton import draw_on_device  # imports triton

        with suppress(CompileFailed):
            return draw_on_device(weights, seed, sequence_ids, positions, streams, ids)
    if compiled(weights):
        from kernels.cpu.sampling import calls  # imports numba

        first, second, _, _ = words(seed, sequence_ids, positions, streams)
        shape = torch.broadcast_shapes(first.shape, weights.shape[:-1])
        return calls.draw(weights.expand(*shape, -1), first.expand(shape), second.expand(shape), ids)
    tokens = weights.shape[-1] if ids is None else ids
    noise = exponentials(seed, sequence_ids, positions, streams, tokens)
    return argmax(weights / noise)
