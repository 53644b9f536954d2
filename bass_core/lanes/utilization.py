"""A lane's use of its device: FLOPs and bytes, relative to the device's peaks (decode/peaks.py).

FLOPs utilisation = (2 x target parameters x tokens verified + 2 x draft parameters x tokens that the draft model
drew + FLOPs of attention) / (lane time x peak FLOP/s). `useful` counts only the target's work for emitted tokens.

Bandwidth utilisation = bytes of weights and of live keys and values that had to be read / (lane time x peak bytes
per second). It can be above 1 if they are read from the processor's cache, or if the peak was measured on a busy
machine. Prefills are left out. A figure is None if the device's peak is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from ..machine.hardware import Peaks
from ..model.weights.cost import ModelCost
from ..sequence import Round, Sequence, WindowWork


@dataclass
class Work:
    """Running sums over the rounds of a lane.

    Attributes:
        draft: costs of the pair's draft model, or None if the lane does not run it.
        peaks: peaks of the lane's device, in the target's dtype.
        useful_flops: FLOPs of the target for emitted tokens.
    """

    target: ModelCost
    draft: ModelCost | None = None
    peaks: Peaks = field(default_factory=Peaks)
    flops: float = 0.0
    useful_flops: float = 0.0
    bytes_read: float = 0.0

    def add(self, round_: Round, sequences: list[Sequence]) -> None:
        """Count one round, whose tokens are already written. Skip prefills."""
        if round_.kind == "prefill":
            return
        lengths = [len(sequences[row.sequence].tokens) - len(row.tokens) for row in round_.rows]
        if self.draft is not None and lengths:
            self._add_drafts(self.draft, round_, sum(lengths) / len(lengths))
        if round_.windowed is not None:
            self._add_windowed(round_.windowed)
        fed, emitted, seen, useful_seen = 0, 0, 0.0, 0.0
        for row, before in zip(round_.rows, lengths, strict=True):
            tokens, useful = len(row.drafted) + 1, len(row.tokens)
            fed, seen = fed + tokens, seen + _seen(tokens, before)
            emitted, useful_seen = emitted + useful, useful_seen + _seen(useful, before)
        self.flops += 2.0 * self.target.parameters * fed + self.target.attention_flops * seen
        self.useful_flops += 2.0 * self.target.parameters * emitted + self.target.attention_flops * useful_seen
        read = sum(lengths) + fed - len(lengths)
        self.bytes_read += self.target.weight_bytes + self.target.kv_bytes * read

    def _add_drafts(self, draft: ModelCost, round_: Round, before: float) -> None:
        """Count a round's drafts as if every row had `before` tokens (the mean) and drafted equally many."""
        rows = len(round_.rows)
        each = round_.draft_tokens / rows
        self.flops += rows * _flops(draft, each, before)
        # One forward draws at most one token per row.
        self.bytes_read += max(round_.draft_forwards, ceil(each)) * draft.weight_bytes
        self.bytes_read += draft.kv_bytes * rows * (each * before + each * (each - 1) / 2)

    def _add_windowed(self, work: WindowWork) -> None:
        """Add the work of the target's windowed forwards, in which each token also attends to itself."""
        seen = work.seen + work.tokens
        self.flops += 2.0 * self.target.parameters * work.tokens + self.target.attention_flops * seen
        self.bytes_read += self.target.weight_bytes * work.forwards + self.target.kv_bytes * work.read

    def utilization(self, decode_ms: float) -> dict[str, float | None]:
        """Return the three utilisations under their names in Metrics: ratios (1 is the peak) or None."""

        def share(amount: float, peak: float | None) -> float | None:
            return amount / (decode_ms / 1000) / peak if decode_ms > 0 and peak else None

        return {
            "flops_utilization": share(self.flops, self.peaks.flops),
            "useful_flops_utilization": share(self.useful_flops, self.peaks.flops),
            "bandwidth_utilization": share(self.bytes_read, self.peaks.bandwidth),
        }


def _flops(cost: ModelCost, tokens: float, before: float) -> float:
    """Return the FLOPs of `tokens` new tokens after `before` cached ones."""
    return 2.0 * cost.parameters * tokens + cost.attention_flops * _seen(tokens, before)


def _seen(tokens: float, before: float) -> float:
    """Return how many tokens `tokens` new ones attend to after `before` cached ones, each also to itself."""
    return tokens * before + tokens * (tokens + 1) / 2
