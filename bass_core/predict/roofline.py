"""Step times from a datasheet: the bytes and FLOPs of a forward, divided by the hardware's rates.

A Roofline has the interface of a CostTable (`RoundCosts`), for one context length. It is always a prediction.

Model of a forward of n tokens in b rows with t cached tokens each, on g GPUs, tensor parallel:
- products: the larger of weights / bandwidth and 2 x parameters x n / compute, each divided by g;
- attention: the larger of keys and values / bandwidth and its FLOPs / compute, divided by min(g, KV heads),
  because a KV head is not split. It does not overlap with the products;
- two all-reduces per layer (Megatron, arXiv 1909.08053) of n x hidden numbers, as a ring: each GPU sends
  2 (g - 1) / g of the bytes, at half of NVLink's figure, which counts both directions; plus a fixed time each;
- a fixed time, and one per layer, longer for n > 1: torch then multiplies with large weights, in more kernels.
Without graphs, it takes the host's time per layer or the device's time, whichever is longer.
A round adds the time in which the device waits for the host: a fixed time and one per row, both longer if it
drafts. The target is split over all GPUs. The draft is split too, or runs on one GPU if that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.plan import SINKS

from .hardware import Assumptions, Hardware
from .shapes import ModelShape

# A window begins at the start of a block of 64 tokens, so on average it is half a block longer than asked for.
_HALF_BLOCK = 32
_FILL = 0.9  # share of the memory for weights, keys and values


@dataclass(frozen=True)
class Roofline:
    """Predicted RoundCosts of a pair on `gpus` GPUs, in milliseconds, if rows have `context` tokens on average."""

    hardware: Hardware
    target: ModelShape
    draft: ModelShape | None
    context: float
    gpus: int = 1
    assumed: Assumptions = field(default_factory=Assumptions)
    padded: bool = True

    def verify_ms(self, rows: int, tokens: float) -> float:
        """Return the time of a forward of the target, with `tokens` tokens in all rows, and of the host."""
        return self.step_ms(self.target, rows, tokens, self.gpus) + self._host_ms(rows)

    def draft_ms(self, rows: int) -> float:
        """Return the time of one forward of the draft with one token per row, or 0 without a draft model."""
        return self.draft_feed_ms(rows, rows)

    def proposal_ms(self, rows: int) -> float:
        """Return the time of the host that drafting adds to a round."""
        return (self.assumed.drafting_us + rows * self.assumed.drafting_row_us) / 1000

    def _host_ms(self, rows: int) -> float:
        """Return the time of the host in a round without drafts."""
        return (self.assumed.host_us + rows * self.assumed.host_row_us) / 1000

    def draft_feed_ms(self, rows: int, tokens: float) -> float:
        """Return the time of one forward of the draft, with `tokens` tokens in all rows together."""
        draft = self.draft
        return min(self.step_ms(draft, rows, tokens, gpus) for gpus in {1, self.gpus}) if draft else 0.0

    def step_ms(self, model: ModelShape, rows: int, tokens: float, gpus: int) -> float:
        """Return the time of one forward, by the formulas in the module docstring."""
        cost, assumed = model.cost, self.assumed
        bandwidth = assumed.bandwidth * self.hardware.bandwidth * 1e9
        compute = assumed.compute * self.hardware.flops
        products = max(cost.weight_bytes / bandwidth, 2 * cost.parameters * tokens / compute) / gpus
        width = tokens / rows
        seen = tokens * (self.context + (width + 1) / 2)
        attention = max(
            rows * (self.context + width) * cost.kv_bytes / bandwidth, cost.attention_flops * seen / compute
        ) / min(gpus, model.kv_heads)
        if not self.hardware.graphs:  # the device computes while the host launches
            return 1000 * max(products + attention, model.layers * assumed.eager_layer_us * 1e-6)
        layer_us = assumed.wide_layer_us + model.torch_kernels * assumed.kernel_us
        layer_us = assumed.layer_us if tokens <= 1 else layer_us
        fixed = (assumed.step_us + model.layers * layer_us) * 1e-6
        return 1000 * (products + attention + fixed + self._reduce(model, tokens, gpus))

    def _reduce(self, model: ModelShape, tokens: float, gpus: int) -> float:
        """Return the seconds of a forward's all-reduces."""
        if gpus == 1:
            return 0.0
        one_way = self.assumed.link * self.hardware.nvlink * 1e9 / 2
        moved = 2 * (gpus - 1) / gpus * 2 * tokens * model.hidden
        return 2 * model.layers * (moved / one_way + self.assumed.allreduce_us * 1e-6)

    @property
    def _linked(self) -> bool:
        """Whether the target can be split over the GPUs: there is only one, or they are linked."""
        return self.gpus == 1 or self.hardware.nvlink > 0

    def windowed(self, window: int) -> Roofline:
        """Return a Roofline whose target drafts for itself, reading SINKS and the last `window` tokens per row."""
        return self.seeing(SINKS + window + _HALF_BLOCK)

    def seeing(self, tokens: float) -> Roofline:
        """Return a Roofline whose target drafts for itself, reading `tokens` cached tokens of each row."""
        return _Windowed(**(vars(self) | {"seen": tokens}))

    def fits(self, rows: int) -> bool:
        """Return whether weights, keys and values fit in nine tenths of the memory.

        Every GPU holds the whole draft. False for several GPUs without a link between them.
        """
        if not self._linked:
            return False
        draft_bytes, kv = (self.draft.held_bytes, self.draft.cost.kv_bytes) if self.draft else (0.0, 0)
        weights_per_gpu = self.target.held_bytes / self.gpus + draft_bytes
        cached = rows * self.context * (self.target.cost.kv_bytes / min(self.gpus, self.target.kv_heads) + kv)
        return weights_per_gpu + cached <= _FILL * self.hardware.memory * 1e9


@dataclass(frozen=True)
class _Windowed(Roofline):
    """A Roofline whose target drafts for itself, reading `seen` cached tokens. It has no draft model."""

    seen: float = 0

    def draft_feed_ms(self, rows: int, tokens: float) -> float:
        """Return the time of a windowed forward of the target, with `tokens` tokens in all rows together."""
        short = Roofline(self.hardware, self.target, self.draft, self.seen, self.gpus, self.assumed)
        return short.step_ms(self.target, rows, tokens, self.gpus)

    def fits(self, rows: int) -> bool:
        """Return whether the target's weights, keys and values fit. There is no draft model."""
        if not self._linked:
            return False
        cached = rows * self.context * self.target.cost.kv_bytes / min(self.gpus, self.target.kv_heads)
        return self.target.held_bytes / self.gpus + cached <= _FILL * self.hardware.memory * 1e9
