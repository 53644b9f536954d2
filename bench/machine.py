"""This machine's peaks: memory bandwidth in bytes/s, and FLOP/s. Call `measure` first.

Both are measured (on a CPU by bass_core/machine/cpu_speed.py), except for the FLOP/s of a GPU that
bass_core/machine/hardware.py knows: those are the datasheet's. At these peaks, no step can take less time than its
roofline: the longer of the times for its bytes and for its FLOPs. Source: Williams, Waterman and Patterson,
"Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bass_core.machine.cpu_speed import bandwidth_array_bytes, filled_array, product_flops, read_speeds
from bass_core.machine.hardware import copy_bandwidth, dense_peak
from bass_core.model.weights.cost import ModelCost

from .report.report import median


@dataclass(frozen=True)
class Machine:
    """The peaks of a machine: bytes read from memory per second, and floating-point operations per second."""

    bandwidth: float
    flops: float

    def bytes_ms(self, cost: ModelCost, rows: int, context: int) -> float:
        """Return the milliseconds to read the weights once and the keys and values of all rows."""
        return 1000 * (cost.weight_bytes + rows * context * cost.kv_bytes) / self.bandwidth

    def flops_ms(self, cost: ModelCost, tokens: float, context: int) -> float:
        """Return the milliseconds to compute a forward of `tokens` tokens."""
        return 1000 * tokens * (2 * cost.parameters + context * cost.attention_flops) / self.flops

    def ridge(self, cost: ModelCost, rows: int, context: int) -> float:
        """Return the number of tokens per step above which computing takes longer than reading."""
        return self.bytes_ms(cost, rows, context) / self.flops_ms(cost, 1, context)


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Return the peaks of `device` for products in `dtype`."""
    if device.type == "cuda":
        peak = dense_peak(torch.cuda.get_device_name(device), dtype)
        return Machine(copy_bandwidth(device), peak or _cuda_products(device, dtype))
    speeds = read_speeds(filled_array(bandwidth_array_bytes() or 256 << 20))
    return Machine(max(speeds.values()), product_flops(dtype))


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
