"""Measure how fast this CPU reads memory and multiplies matrices, with torch's own operations.

Call `read_bandwidth` and `product_flops`. Both figures are for torch's current number of threads and for this
moment: other work on the machine lowers them. Measuring both takes about a second and
`bandwidth_array_bytes()` bytes of memory. decode/peaks.py decides when to measure, and keeps the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .memory import available_bytes

CPUS = Path("/sys/devices/system/cpu")
# Assumed size of the last-level cache if the system doesn't report it.
LAST_CACHE = 32 << 20
# The array to read has TARGET_CACHES times the last-level caches, but at most MAX_BYTES (or MIN_CACHES times the
# caches, if that is more) and half of the free memory. In a smaller array, a pass would find data of the previous
# pass in the cache.
TARGET_CACHES, MIN_CACHES, MAX_BYTES = 10, 2, 256 << 20
# Stop reading after PASSES passes or SECONDS seconds.
PASSES, SECONDS = 16, 0.2
# Square matrices to multiply: their sizes, and the number of products per size. A size is skipped if its product
# should take longer than PRODUCT_SECONDS.
SIZES, PRODUCT_SECONDS, PRODUCTS = (256, 512, 1024), 0.15, 5

# Two ways to read an array once; the CPU and the number of threads decide which is faster.
READS: dict[str, Callable[[Tensor], object]] = {
    "largest float32": lambda array: array.amax(),
    "sum of int64": lambda array: array.view(torch.int64).sum(),
}


def last_cache() -> int:
    """Return the bytes of the last-level caches of this process's cores (Linux), else LAST_CACHE."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    caches: dict[tuple[str, str], int] = {}
    for core in cores:
        try:
            # The folder with the highest number is the last level. Cores that share a cache list the same cores.
            last = max((CPUS / f"cpu{core}" / "cache").glob("index[0-9]*"), key=lambda path: int(path.name[5:]))
            kib = int((last / "size").read_text(encoding="utf-8").strip().removesuffix("K"))
            caches[(last / "shared_cpu_list").read_text(encoding="utf-8"), last.name] = kib << 10
        except (OSError, ValueError):  # max() of nothing is a ValueError too
            return LAST_CACHE
    return sum(caches.values()) or LAST_CACHE


def bandwidth_array_bytes(most: int = MAX_BYTES) -> int:
    """Return the bytes of the array to read; 0 if there is no memory for MIN_CACHES last-level caches."""
    cache = last_cache()
    most = max(most, MIN_CACHES * cache)
    size = min(TARGET_CACHES * cache, most, available_bytes(torch.device("cpu")) // 2)
    return size if size >= MIN_CACHES * cache else 0


def filled_array(size: int) -> Tensor:
    """Return float32 ones of `size` bytes. Unwritten memory would be one shared zero page, always in the cache."""
    return torch.ones(size // 8 * 2)


def read_speeds(array: Tensor, passes: int = PASSES, seconds: float = SECONDS) -> dict[str, float]:
    """Return the bytes per second of the best pass over the array float32 [N], N even, for each of READS.

    The ways take turns, so that a slow moment of the machine affects all of them.
    """
    best = dict.fromkeys(READS, 0.0)
    end = time.perf_counter() + seconds
    for _ in range(passes):
        for name, read in READS.items():
            best[name] = max(best[name], array.nbytes / _seconds(partial(read, array)))
        if time.perf_counter() > end:
            break
    return best


def read_bandwidth(most: int = MAX_BYTES) -> float | None:
    """Return how many bytes per second this CPU reads from memory; None if there is no memory to measure it."""
    size = bandwidth_array_bytes(most)
    return max(read_speeds(filled_array(size)).values()) if size else None


def product_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large product in this dtype, or in float32 if that is faster.

    If the CPU has no instructions for products in this dtype, torch takes up to a hundred times as long as in
    float32 (measured for float16). A model then converts its weights to float32 instead.
    """
    return max(flops_of(candidate) for candidate in {dtype, torch.float32})


def flops_of(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of square matrices: the best over all sizes that are not too slow."""
    best = 0.0
    for size in SIZES:
        work = 2 * size**3
        if best and work / best > PRODUCT_SECONDS:
            break
        left, right, out = torch.ones(3, size, size, dtype=dtype)
        multiply = partial(torch.mm, left, right, out=out)
        multiply()  # warm-up: torch chooses and compiles its kernel
        best = max(best, *(work / _seconds(multiply) for _ in range(PRODUCTS)))
    return best


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
