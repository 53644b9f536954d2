"""Memory left on a device, and the error for a failed allocation.

`available_bytes` returns how much new allocations can take. `private_pools` lists the memory that captured graphs
reserve. `shortage_explained` turns a failed allocation on any device into MemoryShortage and frees the failed
step's tensors. decode/admission.py estimates the needs of a request.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from kernels.support import is_accelerator, runtime

from ..errors import MemoryShortage
from .container import memory_left

_SHORTAGE_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad allocation")


def available_bytes(device: torch.device) -> int:
    """Return how many bytes new allocations on the device could take."""
    if is_accelerator(device):
        module = runtime(device)
        free, _ = module.mem_get_info(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        # Only later captures in the same pool can use the unused part of a private pool.
        unusable = sum(reserved - used for reserved, used in private_pools(device).values())
        return int(free + max(0, unused - unusable))
    free, left = int(psutil.virtual_memory().available), memory_left()
    return free if left is None else min(free, left)


def private_pools(device: torch.device) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return the bytes reserved and the bytes in use of each pool that captured graphs hold on the device."""
    snapshot = getattr(runtime(device), "memory_snapshot", None) if is_accelerator(device) else None
    if snapshot is None:
        return {}
    index = device.index if device.index is not None else runtime(device).current_device()
    pools: dict[tuple[int, ...], tuple[int, int]] = {}
    try:
        segments = snapshot()
    except RuntimeError:  # with the backend cudaMallocAsync, torch's allocator has no segments
        return {}
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", ()))
        if segment["device"] == index and any(pool):
            reserved, used = pools.get(pool, (0, 0))
            pools[pool] = reserved + segment["total_size"], used + segment["allocated_size"]
    return pools


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Raise MemoryShortage in place of an allocator's error; other errors pass through."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        # Clear the traceback's frames, because they keep the failed step's tensors alive as long as the error
        # exists.
        traceback.clear_frames(error.__traceback__)
        raise MemoryShortage(
            "The device ran out of memory during this race, which was ended: ask for a smaller batch or for fewer "
            "tokens."
        ) from None


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _SHORTAGE_MESSAGES)
