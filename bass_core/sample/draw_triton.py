"""`draw` and the top-p threshold on a GPU, with kernels/triton/accept.py and kernels/triton/nucleus.py.

Arguments and results are those of draw.py and distribution.py, which are the reference. Importing this imports
triton. Only the first use of a seed on a device waits for that device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.support import is_accelerator, on, runtime
from kernels.triton import accept as kernel
from kernels.triton import nucleus

from ..machine.transfer import to_device


def draw_on_device(
    weights: Tensor, seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor, ids: Tensor | None
) -> Tensor:
    """Draw as `draw` does."""
    with on(weights.device):
        return kernel.draw(weights, sequence_ids, positions, streams, seed_on(seed, weights.device), ids)


def threshold_on_device(probs: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability [..., 1] that top-p keeps of probs [..., V]."""
    with on(probs.device):
        return nucleus.threshold(probs, top_p)


def seed_on(seed: Any, device: torch.device) -> Tensor:
    """Return the seed on the device, int64 [1]; a seed that is there already is returned as it is."""
    return seed if isinstance(seed, Tensor) else _copied_seed(seed, device)


@lru_cache(maxsize=16)
def _copied_seed(seed: int, device: torch.device) -> Tensor:
    """Copy a seed. Lanes on all streams share it, so its first use waits until the copy has finished."""
    copied = to_device([seed], device)
    if is_accelerator(device):
        runtime(device).current_stream(device).synchronize()
    return copied
