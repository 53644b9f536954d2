"""GPUs as their datasheets describe them, and assumptions about the share of those figures that a step reaches.

Contract: `Hardware` holds only datasheet numbers, none of them measured here; `Assumptions` holds everything that
is neither from a datasheet nor measured, each an option of the bench. Dense peaks are those of
bass_core/machine/hardware.py (half of the datasheet's figure where it is given with sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from bass_core.machine.hardware import dense_peak


@dataclass(frozen=True)
class Hardware:
    """One GPU. bandwidth: of its memory, GB/s; memory: GB; nvlink: GB/s per GPU, both directions together."""

    name: str
    bandwidth: float
    memory: float
    nvlink: float
    source: str

    @cached_property
    def flops(self) -> float:
        """Dense bfloat16 FLOP/s."""
        peak = dense_peak(self.name, torch.bfloat16)
        assert peak is not None, self.name
        return peak


HARDWARE = {
    "A100": Hardware("A100", 2039, 80, 600, "datasheet: NVIDIA A100 Tensor Core GPU, A100 80GB SXM"),
    "H100": Hardware("H100", 3350, 80, 900, "datasheet: NVIDIA H100 Tensor Core GPU, H100 SXM"),
    "H200": Hardware("H200", 4800, 141, 900, "datasheet: NVIDIA H200 Tensor Core GPU, H200 SXM"),
    "B200": Hardware("B200", 8000, 180, 1800, "datasheet: NVIDIA DGX B200, an eighth of its totals"),
}


@dataclass(frozen=True)
class Assumptions:
    """Numbers that are neither measured nor from a datasheet.

    bandwidth, compute, link: the share of the datasheet's figure that a step reaches; layer_us: microseconds per
    layer besides reading and multiplying (launches, norms, short kernels); allreduce_us: microseconds per
    all-reduce besides moving its bytes.
    """

    bandwidth: float = 0.8
    compute: float = 0.6
    link: float = 0.7
    layer_us: float = 5.0
    allreduce_us: float = 10.0
