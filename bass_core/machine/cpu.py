"""What this CPU offers to the process.

Contract: `cores` counts those that the scheduler allows (CPU affinity) and that a container's quota pays for, not
the cores of the machine.
"""

from __future__ import annotations

import os

import torch

from .container import cpu_quota


def cores() -> int:
    """Number of cores that this process may use at once, at least 1.

    A thread beyond the quota stops them all for the rest of each period, so that a part of a core counts as none.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)
