"""`draw` and the top-p threshold on a GPU, by kernels/triton/accept.py and kernels/triton/nucleus.py.

Contract: the arguments and results of draw.py and distribution.py, which are the reference. Importing this imports
triton. Only the first use of a seed on a device waits for that device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels.support import is_accelerator, on, runtime
from kernels.triton import accept as kernel
from kernels.triton import nucleus

from ..machine.transfer import to_device


def draw_on_device(
    weights: Tensor, seed: int, sequence_ids: Tensor, positions: Tensor, streams: Tensor, ids: Tensor | None
) -> Tensor:
    """See `draw`."""
    with on(weights.device):
        return kernel.draw(weights, sequence_ids, positions, streams, seed_on(seed, weights.device), ids)


def threshold_on_device(probs: Tensor, top_p: float) -> Tensor:
    """The least probability [..., 1] that top-p keeps of probs [..., V]."""
    with on(probs.device):
        return nucleus.threshold(probs, top_p)


@lru_cache(maxsize=16)
def seed_on(seed: int, device: torch.device) -> Tensor:
    """The seed int64 [1] on the device. Lanes on any stream share it, so its first use waits until it is there."""
    made = to_device([seed], device)
    if is_accelerator(device):
        runtime(device).current_stream(device).synchronize()
    return made
