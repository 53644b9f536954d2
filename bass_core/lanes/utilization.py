"""How much of a GPU a lane uses: FLOPs against the dense peak, bytes against the copy bandwidth.

Contract: FLOPs utilisation = (2 x target parameters x tokens verified + 2 x draft parameters x tokens drafted +
attention's) / (lane time x peak); `useful` counts emitted tokens alone; bandwidth utilisation = bytes of weights
and live keys and values that had to be read / (lane time x copy bandwidth). Lane time runs from the end of the
first prefill, and prefills are not counted. All are None where the peak is not known, as on a CPU. Peaks are the
vendors' datasheets', dense, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernels.support import is_accelerator, on, runtime

from ..sequence import Round, Sequence

# (part of the name, dense float16 and bfloat16 TFLOP/s, float32 TFLOP/s); the first that fits counts.
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
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


# Far more than any cache on the way to the memory holds.
COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class ModelCost:
    """What one forward costs: `parameters` a token is multiplied with, their bytes, bytes of keys and values a
    cached token, and FLOPs of attention for one query token and one cached token."""

    parameters: int
    weight_bytes: int
    kv_bytes: int
    attention_flops: int


def model_cost(model: Any, kv_bytes: int) -> ModelCost:
    """Of a transformers causal LM: all weights but an embedding table that is only looked up."""
    config = model.config.get_text_config()
    weights = {id(parameter): parameter for parameter in model.parameters()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        weights.pop(id(embedding.weight), None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelCost(
        parameters=sum(parameter.numel() for parameter in weights.values()),
        weight_bytes=sum(_nbytes(parameter) for parameter in weights.values()),
        kv_bytes=kv_bytes,
        attention_flops=4 * config.num_hidden_layers * config.num_attention_heads * dim,
    )


def _nbytes(weight: torch.Tensor) -> int:
    """A quantised weight has one byte a number, whatever dtype it shows."""
    return weight.nbytes if type(weight.data) is torch.Tensor else weight.numel()


@dataclass
class Work:
    """Running sums over the rounds of a lane. `draft` None: nothing is drafted with a model.

    bandwidth: `known_bandwidth` of the device; None leaves bandwidth_utilization out.
    """

    target: ModelCost
    draft: ModelCost | None = None
    bandwidth: float | None = None
    flops: float = 0.0
    useful_flops: float = 0.0
    bytes_read: float = 0.0

    def add(self, round_: Round, sequences: list[Sequence]) -> None:
        """Count one round, of which the sequences have the tokens already; prefills are left out."""
        if round_.kind == "prefill":
            return
        self.bytes_read += self.target.weight_bytes
        if self.draft is not None:
            self.bytes_read += max(len(row.drafted) for row in round_.rows) * self.draft.weight_bytes
        for row in round_.rows:
            before = len(sequences[row.sequence].tokens) - len(row.tokens)
            drafted, emitted = len(row.drafted), len(row.tokens)
            self.flops += _flops(self.target, drafted + 1, before)
            self.useful_flops += _flops(self.target, emitted, before)
            self.bytes_read += self.target.kv_bytes * (before + drafted)
            if self.draft is not None:
                self.flops += _flops(self.draft, drafted, before)
                self.bytes_read += sum(self.draft.kv_bytes * (before + i) for i in range(drafted))

    def utilization(self, decode_ms: float, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """flops_utilization, useful_flops_utilization and bandwidth_utilization, plain ratios or None."""
        names = ("flops_utilization", "useful_flops_utilization", "bandwidth_utilization")
        if decode_ms <= 0 or not is_accelerator(device):
            return dict.fromkeys(names)
        peak = dense_peak(runtime(device).get_device_name(device), dtype)
        seconds = decode_ms / 1000
        flops = (None, None) if peak is None else (self.flops / seconds / peak, self.useful_flops / seconds / peak)
        copied = None if self.bandwidth is None else self.bytes_read / seconds / self.bandwidth
        return dict(zip(names, (*flops, copied), strict=True))


def _flops(cost: ModelCost, tokens: int, before: int) -> float:
    """Of `tokens` new tokens behind `before` cached ones."""
    seen = tokens * before + tokens * (tokens + 1) / 2
    return 2.0 * cost.parameters * tokens + cost.attention_flops * seen


def dense_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device's datasheet gives for dense products of the dtype, or None for an unknown device."""
    for part, low, single in PEAKS:
        words, wanted = name.split(), part.split()
        spans = (words[i : i + len(wanted)] for i in range(len(words)))
        if any(" ".join(span).startswith(part) and _same(span[-1], wanted[-1]) for span in spans if span):
            return 1e12 * (single if dtype == torch.float32 else low)
    return None


def _same(word: str, wanted: str) -> bool:
    """Of the last word of a part: "A100-SXM4-80GB" is an A100, "A10G" is no A10."""
    return word == wanted or word.startswith(wanted + "-")


def known_bandwidth(device: torch.device) -> float | None:
    """`copy_bandwidth`; None on a CPU, or while there is no memory to measure it with."""
    if not is_accelerator(device):
        return None
    try:
        return copy_bandwidth(device)
    except torch.OutOfMemoryError:
        return None


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy inside the device's memory reads and writes, both counted; median of nine.

    Measured at the first call, which should come when nothing else runs on the device.
    """
    with on(device):
        # Not random: another thread may be capturing, and torch's generator is one for the device.
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        times = []
        for _ in range(12):
            begin, end = (runtime(device).Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 2 * COPY_BYTES / (sorted(times[3:])[4] / 1000)
