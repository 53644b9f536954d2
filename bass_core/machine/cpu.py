"""The CPU cores and instructions that this process may use."""

from __future__ import annotations

import os

import torch

from .container import cpu_quota


def cores() -> int:
    """Return the number of cores that this process may use at once, at least 1.

    It counts the cores that the scheduler allows (CPU affinity), up to a container's quota, not those of the
    machine. The quota is rounded down, because one thread too many would stop all threads for the rest of each
    period. For example, a quota of 2.5 cores gives 2.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
