"""Numbers between host and device without making either wait.

Contract: `to_device` never synchronises: on an accelerator it copies from pinned memory in stream order. `to_host`
is where a round waits for the device, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime


def to_device(values: list[Any] | Tensor, device: torch.device) -> Tensor:
    """A list (of lists) of numbers as a tensor of torch's default integer or float type, or a tensor as it is."""
    host = values if isinstance(values, Tensor) else torch.tensor(values)
    if not is_accelerator(device) or is_accelerator(host.device):
        return host.to(device)
    # Pageable memory would be copied only after the stream has run dry. Of nothing there is nothing to pin.
    pinned = host.pin_memory() if device.type == "cuda" and host.numel() else host
    return pinned.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host; waits for the device."""
    if not is_accelerator(tensor.device):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    runtime(tensor.device).current_stream(tensor.device).synchronize()
    return host
