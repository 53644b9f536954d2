"""GPUs as their datasheets describe them, and assumptions about the share of those figures that a step reaches.

HARDWARE holds only datasheet numbers, none measured here; `Assumptions` holds everything that is not from a
datasheet. Dense peaks come from bass_core/machine/hardware.py; if a datasheet gives a figure with
sparsity, the dense peak is half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..machine.hardware import dense_peak


@dataclass(frozen=True)
class Hardware:
    """One GPU, or anything else that reads weights and multiplies them.

    Attributes:
        bandwidth: bandwidth of the memory in GB/s.
        flops: dense FLOP/s in the dtype of the weights.
        memory: size of the memory in GB.
        nvlink: GB/s to other GPUs of the same kind, both directions together, or 0 without such a link.
        source: the origin of these numbers.
        graphs: whether steps are CUDA graphs. If not, Python launches each kernel of transformers' own model.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    nvlink: float = 0.0
    source: str = "own numbers"
    graphs: bool = True


def _gpu(name: str, bandwidth: float, memory: float, nvlink: float, source: str) -> Hardware:
    """Return a GPU whose dense bfloat16 peak is in machine/hardware.py."""
    peak = dense_peak(name, torch.bfloat16)
    assert peak is not None, name
    return Hardware(name, bandwidth, peak, memory, nvlink, f"datasheet: NVIDIA {source}")


HARDWARE = {
    "A100": _gpu("A100", 2039, 80, 600, "A100 Tensor Core GPU, A100 80GB SXM"),
    "H100": _gpu("H100", 3350, 80, 900, "H100 Tensor Core GPU, H100 SXM"),
    "H200": _gpu("H200", 4800, 141, 900, "H200 Tensor Core GPU, H200 SXM"),
    "B200": _gpu("B200", 8000, 180, 1800, "DGX B200, an eighth of its totals"),
    "laptop": _gpu("RTX 5090 Laptop", 896, 24, 0, "GeForce RTX 5090 Laptop GPU, 1824 AI TOPS"),
    # A workload gets half of an RTX PRO 6000 Blackwell, with 48 GB (huggingface.co/docs/hub/spaces-zerogpu).
    "ZeroGPU": Hardware(
        "ZeroGPU",
        1792 / 2,
        503.8e12 / 2,
        48,
        0,
        "datasheet: NVIDIA RTX PRO 6000 Blackwell, half of it",
        graphs=False,
    ),
}


@dataclass(frozen=True)
class Assumptions:
    """Numbers that are not from a datasheet.

    The times in microseconds fit rounds of the shipped pair on one H200
    (bench/results/gpu-nvidia-h200-2026-11-27.json; `python -m bench simulate` prints the errors), and are assumed
    for all other hardware and models. That file cannot separate the host's time from the gaps between the kernels
    of a graph, so both are in `host_us`.

    Attributes:
        bandwidth: the share of the datasheet's bandwidth that a step reaches.
        compute: the share of the datasheet's FLOP/s that a step reaches.
        link: the share of NVLink's bandwidth that a step reaches.
        step_us: microseconds per forward besides its layers (embedding, last norm, draws).
        layer_us: microseconds per layer besides reading and multiplying (launches, norms, short kernels), in a
            step of one token.
        wide_layer_us: the same as `layer_us`, in a step of several tokens.
        kernel_us: microseconds of each additional kernel in layers whose products are torch's (read, not run).
        eager_layer_us: all microseconds per layer without graphs: those of `generate` in that file.
        allreduce_us: microseconds per all-reduce besides moving its bytes.
        host_us: microseconds of a regular round in which the device does not compute.
        host_row_us: the additional wait for each row.
        drafting_us: what drafting adds to `host_us`.
        drafting_row_us: what drafting adds to `host_row_us`.
    """

    bandwidth: float = 0.8
    compute: float = 0.6
    link: float = 0.7
    step_us: float = 75.0
    layer_us: float = 13.1
    wide_layer_us: float = 21.0
    kernel_us: float = 2.6
    eager_layer_us: float = 1040.0
    allreduce_us: float = 10.0
    host_us: float = 320.0
    host_row_us: float = 16.0
    drafting_us: float = 330.0
    drafting_row_us: float = 34.0
