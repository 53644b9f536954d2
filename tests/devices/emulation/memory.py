"""The emulated device's memory: its contents, its use, and its limit.

A Memory exists as long as a tensor uses it; memory allocated in a capture exists as long as the graph. As in
torch's allocator, freed memory stays reserved until `empty_cache`, and a graph's until the graph is deleted.
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
# Bytes that the pools of graphs reserve.
_reserved = [0] * order.DEVICES
# For each pool of a device's graphs: reserved bytes, and the bytes that tensors use.
_pools: dict[tuple[int, Any], list[int]] = {}
# Set by a capture that failed to end: torch's allocator then refuses to free memory.
stuck = False
# Maps the address of a device tensor's storage to its memory on the CPU.
_memories: dict[int, Memory] = {}


class Memory:
    """One allocation: its CPU storage, its last writer, and its readers since that write."""

    def __init__(self, storage: torch.UntypedStorage, device: int, pool: Any = None) -> None:
        self.storage, self.device, self.pool = storage, device, pool
        self.nbytes = storage.nbytes()
        self.watch: weakref.ref[Any] | None = None
        self.writer: tuple[order.Key, int] | None = None
        self.readers: dict[order.Key, int] = {}
        _take(device, self.nbytes, pool)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor like `tensor`, which uses this memory."""
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self.storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def free(self) -> None:
        if self.pool is None:
            _allocated[self.device] -= self.nbytes
        else:
            _pools[self.device, self.pool][1] -= self.nbytes


def _take(device: int, nbytes: int, pool: Any) -> None:
    taken = _allocated[device] + _reserved[device]
    if taken + nbytes > total_bytes:
        raise torch.OutOfMemoryError(
            f"emul out of memory. Tried to allocate {nbytes} bytes of {total_bytes}; {taken} are taken."
        )
    if pool is not None:
        counts = _pools.setdefault((device, pool), [0, 0])
        counts[:] = counts[0] + nbytes, counts[1] + nbytes
        _reserved[device] += nbytes
        return
    _allocated[device] += nbytes
    _cached[device] = max(_cached[device], _allocated[device])


def attach(tensor: Tensor, memory: Memory) -> None:
    """Let a new tensor of the device use this memory."""
    storage = tensor.untyped_storage()
    address = storage._cdata
    memory.watch = weakref.ref(storage, lambda _: _forget(address))
    _memories[address] = memory


def _forget(address: int) -> None:
    _memories.pop(address).free()


def memory_of(tensor: Tensor) -> Memory:
    return _memories[tensor.untyped_storage()._cdata]


def is_emulated(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == TYPE


def raw_of(x: Any) -> Any:
    """Return the CPU tensor that shares the memory of a tensor of the device; return anything else unchanged."""
    if not is_emulated(x):
        return x
    return memory_of(x).view(x)


def give_back(device: int, pool: Any, nbytes: int) -> None:
    """Give the bytes of a deleted graph back to the device: the graph's pool no longer reserves them."""
    _pools[device, pool][0] -= nbytes
    _reserved[device] -= nbytes


def memory_allocated(device: Any = None) -> int:
    number = order.index_of(device)
    return _allocated[number] + sum(used for (owner, _), (_, used) in _pools.items() if owner == number)


def memory_reserved(device: Any = None) -> int:
    """Return the bytes taken from the device: used by tensors, cached after they were freed, or held by graphs."""
    number = order.index_of(device)
    return _cached[number] + _reserved[number]


def memory_snapshot() -> list[dict[str, Any]]:
    """Return one segment per device, with pool id (0, 0), and one per pool of graphs."""
    devices = {(number, (0, 0)): (_cached[number], _allocated[number]) for number in range(order.DEVICES)}
    return [
        {"device": number, "segment_pool_id": pool, "total_size": reserved, "allocated_size": used}
        for (number, pool), (reserved, used) in {**devices, **_pools}.items()
    ]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return max(0, total_bytes - memory_reserved(device)), total_bytes


def empty_cache() -> None:
    """Free the memory that no tensor uses; raise if a failed capture has left the allocator stuck."""
    if stuck:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    _cached[:] = _allocated
