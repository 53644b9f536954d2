"""The emulated device's memory: contents, use, and running out.

Contract: a Memory lives as long as a tensor that shows it; a graph's own memory as long as the graph. As with
torch's allocator, freed memory stays reserved until `empty_cache`, and a graph's until the graph is gone.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from . import order
from .order import TYPE

# Bytes of each device; a test may set it.
total_bytes = 4 << 30
_allocated = [0] * order.DEVICES
_cached = [0] * order.DEVICES
# For each pool of a device's graphs: bytes taken, and the part of them that tensors show.
_pools: dict[tuple[int, Any], list[int]] = {}
# Set by a capture that failed to end: torch's allocator then refuses to give memory back.
stuck = False
# From the address of a tensor's storage to the memory it stands for on the CPU.
_shown: dict[int, Memory] = {}


class Memory:
    """One allocation: the CPU storage that stands for it, its last writer, and its readers since."""

    def __init__(self, storage: torch.UntypedStorage, device: int, pool: Any = None) -> None:
        self.storage, self.device, self.pool = storage, device, pool
        self.nbytes = storage.nbytes()
        self.writer: tuple[order.Key, int] | None = None
        self.readers: dict[order.Key, int] = {}
        _take(device, self.nbytes, pool)

    def free(self) -> None:
        if self.pool is None:
            _allocated[self.device] -= self.nbytes
        else:
            _pools[self.device, self.pool][1] -= self.nbytes


def _take(device: int, nbytes: int, pool: Any) -> None:
    taken = _allocated[device] + sum(held for held, _ in _pools_of(device).values())
    if taken + nbytes > total_bytes:
        raise torch.OutOfMemoryError(
            f"emul out of memory. Tried to allocate {nbytes} bytes of {total_bytes}; {taken} are taken."
        )
    if pool is not None:
        counts = _pools.setdefault((device, pool), [0, 0])
        counts[:] = counts[0] + nbytes, counts[1] + nbytes
        return
    _allocated[device] += nbytes
    _cached[device] = max(_cached[device], _allocated[device])


def _pools_of(device: int) -> dict[Any, list[int]]:
    return {pool: counts for (number, pool), counts in _pools.items() if number == device}


def show(tensor: Tensor, memory: Memory) -> None:
    """Let a newly made tensor of the device stand for that memory."""
    storage = tensor.untyped_storage()
    _shown[storage._cdata] = memory
    weakref.finalize(storage, _forget, storage._cdata).atexit = False


def _forget(address: int) -> None:
    _shown.pop(address).free()


def memory_of(tensor: Tensor) -> Memory:
    return _shown[tensor.untyped_storage()._cdata]


def is_emulated(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == TYPE


def raw_of(x: Any) -> Any:
    """For a tensor of the device, the CPU tensor it stands for, sharing its memory; anything else unchanged."""
    if not is_emulated(x):
        return x
    return torch.empty(0, dtype=x.dtype).set_(memory_of(x).storage, x.storage_offset(), x.size(), x.stride())


def give_back(device: int, pool: Any, nbytes: int) -> None:
    """Return a freed graph's bytes from its pool."""
    _pools[device, pool][0] -= nbytes


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors show."""
    number = order.index_of(device)
    return _allocated[number] + sum(shown for _, shown in _pools_of(number).values())


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device: shown by tensors, freed but kept, or held by graphs."""
    number = order.index_of(device)
    return _cached[number] + sum(held for held, _ in _pools_of(number).values())


def memory_snapshot() -> list[dict[str, Any]]:
    """One segment for each device's own memory, with pool id (0, 0), and one for each pool of graphs."""
    own = {(number, (0, 0)): (_cached[number], _allocated[number]) for number in range(order.DEVICES)}
    return [
        {"device": number, "segment_pool_id": pool, "total_size": held, "allocated_size": shown}
        for (number, pool), (held, shown) in {**own, **_pools}.items()
    ]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free bytes and total bytes."""
    return max(0, total_bytes - memory_reserved(device)), total_bytes


def empty_cache() -> None:
    """Give back what no tensor shows; raises if a failed capture has left the allocator stuck."""
    if stuck:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    _cached[:] = _allocated
