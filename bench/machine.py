"""What this machine can do at best: bytes a second from memory, and products a second.

Contract: both are measured; products in float32 on a CPU, which is what its low-precision weights are multiplied
in. On a GPU that bass_core/lanes/utilization.py knows their rate is the datasheet's. The roofline of a step is the
longer of the times that its bytes and its products take at these rates: no step can be faster.
Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bass_core.machine.hardware import copy_bandwidth, dense_peak
from bass_core.models.cost import ModelCost

from .report.report import median


@dataclass(frozen=True)
class Machine:
    """Bytes read from memory a second, and floating-point operations a second."""

    bandwidth: float
    flops: float

    def bytes_ms(self, cost: ModelCost, rows: int, context: int) -> float:
        """Milliseconds of reading the weights once and the rows' keys and values."""
        return 1000 * (cost.weight_bytes + rows * context * cost.kv_bytes) / self.bandwidth

    def flops_ms(self, cost: ModelCost, tokens: float, context: int) -> float:
        """Milliseconds of the products of so many tokens."""
        return 1000 * tokens * (2 * cost.parameters + context * cost.attention_flops) / self.flops

    def ridge(self, cost: ModelCost, rows: int, context: int) -> float:
        """Tokens a step from which on its products take longer than its bytes."""
        return self.bytes_ms(cost, rows, context) / self.flops_ms(cost, 1, context)


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """The machine under `device`."""
    if device.type == "cuda":
        peak = dense_peak(torch.cuda.get_device_name(device), dtype)
        return Machine(copy_bandwidth(device), peak or _cuda_products(device, dtype))
    weights = torch.randn(1 << 26)  # 256 MB, beyond every cache
    reading = _seconds(lambda: weights.sum())
    left, right = torch.randn(2, 1536, 1536)
    return Machine(weights.nbytes / reading, 2 * 1536**3 / _seconds(lambda: left @ right))


def _cuda_products(device: torch.device, dtype: torch.dtype) -> float:
    left, right = torch.randn(2, 8192, 8192, device=device, dtype=dtype)

    def run() -> None:
        _ = left @ right
        torch.cuda.synchronize(device)

    return 2 * 8192**3 / _seconds(run)


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(8):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])
