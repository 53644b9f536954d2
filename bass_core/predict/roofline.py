"""Step times from a datasheet: what a forward must read and multiply, over the hardware's rates.

Contract: a Roofline has the interface of a CostTable (`RoundCosts`), for one context length; it is always a
prediction.
Model, a forward of n tokens in b rows with t cached tokens each, on g GPUs, tensor parallel:
- products: the larger of weights / bandwidth and 2 x parameters x n / compute, each divided by g;
- attention: the larger of keys and values / bandwidth and its FLOPs / compute, divided by min(g, KV heads): a KV
  head is not split. It does not overlap with the products;
- two all-reduces per layer (Megatron, arXiv 1909.08053) of n x hidden numbers, as a ring: each GPU sends
  2 (g - 1) / g of the bytes, at half of NVLink's figure, which counts both directions; plus a fixed time each;
- a fixed time per layer.
The target is split over all GPUs. The draft is split too or runs whole on one, whichever is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.plan import SINKS

from .hardware import Assumptions, Hardware
from .shapes import Shape

# A window begins up to 63 tokens early.
_HALF_BLOCK = 32
_FILL = 0.9  # the share of memory that weights, keys and values may take


@dataclass(frozen=True)
class Roofline:
    """RoundCosts, in milliseconds, of a pair on `gpus` GPUs at a mean context of `context` tokens per row."""

    hardware: Hardware
    target: Shape
    draft: Shape | None
    context: float
    gpus: int = 1
    assumed: Assumptions = field(default_factory=Assumptions)
    padded: bool = True

    def verify_ms(self, rows: int, tokens: float) -> float:
        """One forward of the target over `tokens` tokens in all rows together."""
        return self.step_ms(self.target, rows, tokens, self.gpus)

    def draft_ms(self, rows: int) -> float:
        """One forward of the draft, one token per row; 0 where drafts take no model."""
        return self.draft_feed_ms(rows, rows)

    def proposal_ms(self, rows: int) -> float:
        """Nothing: only forwards are predicted."""
        return 0.0

    def draft_feed_ms(self, rows: int, tokens: float) -> float:
        """One forward of the draft over `tokens` tokens in all rows together."""
        draft = self.draft
        return min(self.step_ms(draft, rows, tokens, gpus) for gpus in {1, self.gpus}) if draft else 0.0

    def step_ms(self, model: Shape, rows: int, tokens: float, gpus: int) -> float:
        """The time of one forward, by the formulas of the module's contract."""
        cost, assumed = model.cost, self.assumed
        bandwidth = assumed.bandwidth * self.hardware.bandwidth * 1e9
        compute = assumed.compute * self.hardware.flops
        products = max(cost.weight_bytes / bandwidth, 2 * cost.parameters * tokens / compute) / gpus
        width = tokens / rows
        seen = tokens * (self.context + (width + 1) / 2)
        attention = max(
            rows * (self.context + width) * cost.kv_bytes / bandwidth, cost.attention_flops * seen / compute
        ) / min(gpus, model.kv_heads)
        fixed = model.layers * assumed.layer_us * 1e-6
        return 1000 * (products + attention + fixed + self._reduce(model, tokens, gpus))

    def _reduce(self, model: Shape, tokens: float, gpus: int) -> float:
        """Seconds of a forward's all-reduces."""
        if gpus == 1:
            return 0.0
        one_way = self.assumed.link * self.hardware.nvlink * 1e9 / 2
        moved = 2 * (gpus - 1) / gpus * 2 * tokens * model.hidden
        return 2 * model.layers * (moved / one_way + self.assumed.allreduce_us * 1e-6)

    @property
    def _linked(self) -> bool:
        """Whether the GPUs can work together."""
        return self.gpus == 1 or self.hardware.nvlink > 0

    def windowed(self, window: int) -> Roofline:
        """The same pair whose draft is the target itself, over its first SINKS tokens and its last `window`."""
        return self.seeing(SINKS + window + _HALF_BLOCK)

    def seeing(self, tokens: float) -> Roofline:
        """The same pair whose draft is the target itself, over `tokens` cached tokens of each row."""
        return _Windowed(**(vars(self) | {"seen": tokens}))

    def fits(self, rows: int) -> bool:
        """Whether weights, keys and values fit in nine tenths of the memory; every GPU holds the whole draft.

        Several GPUs without a link between them are no home for a model.
        """
        if not self._linked:
            return False
        held, kv = (self.draft.held_bytes, self.draft.cost.kv_bytes) if self.draft else (0.0, 0)
        split = self.target.held_bytes / self.gpus + held
        cached = rows * self.context * (self.target.cost.kv_bytes / min(self.gpus, self.target.kv_heads) + kv)
        return split + cached <= _FILL * self.hardware.memory * 1e9


@dataclass(frozen=True)
class _Windowed(Roofline):
    """A Roofline in which the target drafts for itself and sees `seen` cached tokens; there is no other draft."""

    seen: float = 0

    def draft_feed_ms(self, rows: int, tokens: float) -> float:
        """One windowed forward of the target over `tokens` tokens in all rows together."""
        short = Roofline(self.hardware, self.target, self.draft, self.seen, self.gpus, self.assumed)
        return short.step_ms(self.target, rows, tokens, self.gpus)

    def fits(self, rows: int) -> bool:
        """As a Roofline's, without a draft's weights, keys and values."""
        if not self._linked:
            return False
        cached = rows * self.context * self.target.cost.kv_bytes / min(self.gpus, self.target.kv_heads)
        return self.target.held_bytes / self.gpus + cached <= _FILL * self.hardware.memory * 1e9
