"""Numbers between host and device without making either wait.

Contract: `to_device` never synchronises: on CUDA it copies from pinned memory in stream order. `to_host` is where
a round waits for the device, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: list[Any], device: torch.device) -> Tensor:
    """A list (of lists) of numbers as a tensor of torch's default integer or float type."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    # Pageable memory would be copied only after the stream has run dry.
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host; waits for the device."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
