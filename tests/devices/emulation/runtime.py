"""`torch.emul`, the emulated device's module, with the parts of torch.cuda that this project uses.

`kernels.support.runtime(device)` returns it for a device of type "emul".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import capture, ledger, memory, order
from .capture import CUDAGraph as CUDAGraph
from .capture import graph as graph
from .capture import graph_pool_handle as graph_pool_handle
from .capture import is_current_stream_capturing as is_current_stream_capturing
from .memory import empty_cache as empty_cache
from .memory import mem_get_info as mem_get_info
from .memory import memory_allocated as memory_allocated
from .memory import memory_reserved as memory_reserved
from .memory import memory_snapshot as memory_snapshot
from .order import current_device as current_device
from .order import device as device
from .order import get_sync_debug_mode as get_sync_debug_mode
from .order import set_device as set_device
from .order import set_sync_debug_mode as set_sync_debug_mode
from .order import synchronize as synchronize
from .streams import Event as Event
from .streams import Stream as Stream
from .streams import current_stream as current_stream
from .streams import default_stream as default_stream
from .streams import set_stream as set_stream
from .streams import stream as stream


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 4


def device_count() -> int:
    return order.DEVICES


def get_device_name(device: Any = None) -> str:
    return f"Emulated device {order.index_of(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return get_device_properties(device).major, get_device_properties(device).minor


def get_device_properties(device: Any = None) -> Properties:
    return Properties(get_device_name(device), memory.total_bytes)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers come from the CPU."""


def restore() -> None:
    """Reset counters, hooks, current streams, and unfinished or failed captures."""
    ledger.clear()
    capture.at_end, capture.captured, memory.stuck = None, 0, False
    order.captures.clear()
    order.set_sync_debug_mode(0)
    order.local.__dict__.clear()
