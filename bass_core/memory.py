"""How much memory a device has left, and what happens when it is less than was thought.

Contract: `available_bytes` is what a new allocation could take; `shortage_explained` turns an allocation that
failed, on any device, into MemoryShortage and lets go of what the failed step held. Non-goals: estimating what a
request needs (admission.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from .errors import MemoryShortage

CGROUP = Path("/sys/fs/cgroup")
_SHORT = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad allocation")


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation on the device could take, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(psutil.virtual_memory().available, _left_in_container())


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Raises MemoryShortage in place of the allocator's error; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        # The frames of the failed step still hold its tensors, and live as long as the error does.
        traceback.clear_frames(error.__traceback__)
        raise MemoryShortage(
            "The device ran out of memory during this race, which was ended: ask for a smaller batch or for fewer "
            "tokens."
        ) from None


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in _SHORT)


def _left_in_container() -> int:
    """What a container's limit leaves (cgroup v2); the host's free memory says nothing of that."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # Pages of files are given back when memory is asked for.
        return limit - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):  # no container, or "max"
        return 2**63
