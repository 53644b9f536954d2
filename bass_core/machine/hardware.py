"""GPU limits: peak FLOP/s from datasheets, and the measured copy bandwidth.

Unknown figures are None. Peaks are the vendors' dense figures, without sparsity. The limits of a CPU are measured
in cpu_speed.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.support import is_accelerator, on, runtime

# (part of the device name, dense float16 and bfloat16 TFLOP/s, float32 TFLOP/s) from the vendors' datasheets; the
# first match counts.
PEAKS = (
    ("B200", 2250.0, 75.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 66.9),
    ("H100 PCIe", 756.0, 51.2),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.4, 66.9),
    ("A100", 312.0, 19.5),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("T4", 65.0, 8.1),
    ("RTX PRO 6000 Blackwell", 503.8, 125.0),
    ("RTX 6000 Ada", 364.2, 91.1),
    # Derived from the card's 1824 AI TOPS (FP4 with sparsity): 1/16 and 1/32 of it, as for the RTX 5090.
    ("RTX 5090 Laptop", 114.0, 57.0),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


# Bytes per copy when measuring bandwidth (256 MiB): much more than the GPU's caches.
COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class Peaks:
    """A device's limits; None if not known.

    Attributes:
        bandwidth: bytes of memory per second.
        flops: FLOP/s in one dtype.
    """

    bandwidth: float | None = None
    flops: float | None = None


def dense_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the datasheet's peak FLOP/s of dense products in the dtype; None for an unknown device."""
    for part, half_precision, single in PEAKS:
        words, part_words = name.split(), part.split()
        spans = (words[i : i + len(part_words)] for i in range(len(words)))
        if any(" ".join(span).startswith(part) and _same(span[-1], part_words[-1]) for span in spans if span):
            return 1e12 * (single if dtype == torch.float32 else half_precision)
    return None


def _same(name_word: str, part_word: str) -> bool:
    """Return whether a word of a device's name matches the last word of a table entry.

    For example, "A100-SXM4-80GB" is an A100, but "A10G" is not an A10.
    """
    return name_word == part_word or name_word.startswith(part_word + "-")


def known_bandwidth(device: torch.device) -> float | None:
    """Return `copy_bandwidth`; None on a CPU, or if there is no memory to measure it."""
    if not is_accelerator(device):
        return None
    try:
        return copy_bandwidth(device)
    except torch.OutOfMemoryError:
        return None


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read plus written, of a copy within the device's memory.

    It is the median of nine copies after three for warm-up, measured at the first call. Make that call while
    nothing else runs on the device.
    """
    with on(device):
        # Zeros, because random numbers would use the generator that all threads share, and one of them may be
        # capturing.
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        times = []
        for _ in range(12):
            start, end = (runtime(device).Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 2 * COPY_BYTES / (float(sorted(times[3:])[4]) / 1000)
