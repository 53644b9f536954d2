"""Move data between host and device with as few waits as possible.

`to_device` never synchronizes: it copies from pinned memory, in stream order. `HostCopy` is the only place in a
round that waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime


def to_device(values: list[Any] | Tensor, device: torch.device) -> Tensor:
    """Move a tensor, or a (nested) list of numbers as a tensor of int64, float32 or bool."""
    host = values if isinstance(values, Tensor) else _on_host(values)
    if device.type == "cpu" or not host.is_cpu:
        return host.to(device)
    # A copy from pageable memory would wait for the stream, and so would a copy of a view with gaps, which goes
    # through pageable memory. An empty tensor has nothing to pin.
    host = host.contiguous()
    pinned = host.pin_memory() if device.type == "cuda" and host.numel() else host
    return pinned.to(device, non_blocking=True)


def _on_host(values: list[Any]) -> Tensor:
    # numpy reads a list in a quarter of the time that torch takes.
    array = np.array(values)
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)


def pinned_zeros(*shape: int, device: torch.device) -> Tensor:
    """Return int64 zeros on the host, from which a copy to `device` is not waited for."""
    # torch caches pinned memory, and doesn't hand it out again before copies from it are done.
    return torch.zeros(*shape, dtype=torch.long, pin_memory=device.type == "cuda")


class HostCopy:
    """A copy of a tensor to the host that is under way."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: Any = None
        if not is_accelerator(tensor.device):
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._done = runtime(tensor.device).Event()
        self._done.record(runtime(tensor.device).current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the copy. Work that the device was given after the copy is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def to_host(tensor: Tensor) -> Tensor:
    """Copy the tensor to the host; waits for the current stream."""
    return HostCopy(tensor).wait() if is_accelerator(tensor.device) else tensor
