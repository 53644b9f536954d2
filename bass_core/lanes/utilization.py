"""How much of a GPU a lane uses: FLOPs relative to the dense peak, bytes relative to the copy bandwidth.

Contract: FLOPs utilisation = (2 x target parameters x tokens verified + 2 x draft parameters x tokens that the
draft model drew + FLOPs of attention) / (lane time x peak). `useful` counts only the target's work for emitted
tokens. Bandwidth utilisation = bytes of weights and of live keys and values that had to be read / (lane time x
copy bandwidth). Copied drafts cost nothing; discarded drafts cost as much as others. Prefills are left out of the
work and of the lane time. A figure is None if its peak or bandwidth is not known, as on a CPU. Peaks are from the
vendors' datasheets: dense, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from kernels.support import is_accelerator, runtime

from ..machine.hardware import dense_peak
from ..models.cost import ModelCost
from ..sequence import Round, Sequence


@dataclass
class Work:
    """Running sums over the rounds of a lane. draft: None if the lane does not run the pair's draft model.

    bandwidth: `known_bandwidth` of the device in bytes per second; if None, bandwidth_utilization is None.
    """

    target: ModelCost
    draft: ModelCost | None = None
    bandwidth: float | None = None
    flops: float = 0.0
    useful_flops: float = 0.0
    bytes_read: float = 0.0

    def add(self, round_: Round, sequences: list[Sequence]) -> None:
        """Count one round, whose tokens the sequences already hold; prefills are left out."""
        if round_.kind == "prefill":
            return
        lengths = [len(sequences[row.sequence].tokens) - len(row.tokens) for row in round_.rows]
        if self.draft is not None and lengths:
            self._add_drafts(self.draft, round_, sum(lengths) / len(lengths))
        self.bytes_read += self.target.weight_bytes
        for row, before in zip(round_.rows, lengths, strict=True):
            drafted, emitted = len(row.drafted), len(row.tokens)
            self.flops += _flops(self.target, drafted + 1, before)
            self.useful_flops += _flops(self.target, emitted, before)
            self.bytes_read += self.target.kv_bytes * (before + drafted)

    def _add_drafts(self, draft: ModelCost, round_: Round, before: float) -> None:
        """Count a round's drafts as if each row, `before` tokens long on average, had drafted equally many."""
        rows = len(round_.rows)
        each = round_.draft_tokens / rows
        self.flops += rows * _flops(draft, each, before)
        # One forward draws at most one token per row.
        self.bytes_read += max(round_.draft_forwards, ceil(each)) * draft.weight_bytes
        self.bytes_read += draft.kv_bytes * rows * (each * before + each * (each - 1) / 2)

    def utilization(self, decode_ms: float, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """flops_utilization, useful_flops_utilization, bandwidth_utilization: ratios (1 is the peak) or None."""
        names = ("flops_utilization", "useful_flops_utilization", "bandwidth_utilization")
        if decode_ms <= 0 or not is_accelerator(device):
            return dict.fromkeys(names)
        peak = dense_peak(runtime(device).get_device_name(device), dtype)
        seconds = decode_ms / 1000
        flops = (None, None) if peak is None else (self.flops / seconds / peak, self.useful_flops / seconds / peak)
        copied = None if self.bandwidth is None else self.bytes_read / seconds / self.bandwidth
        return dict(zip(names, (*flops, copied), strict=True))


def _flops(cost: ModelCost, tokens: float, before: float) -> float:
    """FLOPs of `tokens` new tokens after `before` cached ones."""
    seen = tokens * before + tokens * (tokens + 1) / 2
    return 2.0 * cost.parameters * tokens + cost.attention_flops * seen
