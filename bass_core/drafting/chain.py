"""All greedy drafts of a round as one step, so that one CUDA graph holds them: forward, argmax, forward, ...

Contract: `follow` gives the tokens that step-by-step drafting would give, in one replay where the runner
replays. Off unless the draft's `plan` says `chain` (Plan in models/llama_cuda.py), because no GPU has measured
it. Non-goals: sampled drafts, drafts that stop by themselves, draft heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..attention.cache import RaggedCache
from ..engine.runner import ModelRunner
from ..models.base import CausalModel
from ..models.forward import CapturedBatch, ForwardBatch, ForwardOutput
from ..sampling.distribution import argmax


class ChainedModel:
    """A model whose one step is `steps` greedy steps of another: tokens int64 [B, 1, steps] stand for logits.

    It has what a runner asks of a CausalModel; `plan` tells its captured steps from the model's own.
    """

    def __init__(self, model: CausalModel, steps: int, vocab: int) -> None:
        self.model, self.steps, self.vocab = model, steps, vocab
        self.name, self.device = model.name, model.device
        self.plan = (getattr(model, "plan", None), steps, vocab)

    @property
    def capturable(self) -> bool:
        return self.model.capturable

    @capturable.setter
    def capturable(self, capturable: bool) -> None:
        self.model.capturable = capturable

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """Feed ids int64 [B, 1] at the batch's lengths, and what follows behind them."""
        tokens = [batch.tokens]
        for step in range(self.steps):
            ends = [length + step for length in batch.lengths]
            tokens.append(self._choice(self.model.forward(ForwardBatch(tokens[-1], ends), cache, backend)))
        return ForwardOutput(torch.stack(tokens[1:], dim=2))

    def forward_captured(self, batch: CapturedBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """`forward` for lengths that only the device knows.

        The batch's extent is made for the first token and too short for those behind it: all look at the whole
        cache.
        """
        tokens = [batch.tokens]
        for step in range(self.steps):
            one = CapturedBatch(tokens[-1], batch.lengths + step, shared=batch.shared)
            tokens.append(self._choice(self.model.forward_captured(one, cache, backend)))
        return ForwardOutput(torch.stack(tokens[1:], dim=2))

    def _choice(self, output: ForwardOutput) -> Tensor:
        return argmax(output.logits[..., : self.vocab])


def chains(runner: ModelRunner) -> bool:
    """Whether the draft's plan asks for chains."""
    return bool(getattr(getattr(runner.model, "plan", None), "chain", False))


def follow(runner: ModelRunner, first: Tensor, ends: list[int], steps: int) -> Tensor | None:
    """The next `steps` tokens int64 [B, steps] behind first int64 [B], which is fed at `ends`.

    None for zero steps, or where a row lacks room.
    """
    if steps == 0 or steps > runner.cache.room(ends):
        return None
    # The same cache and captured steps under another model, for the duration of this call.
    chained: Any = copy.copy(runner)
    chained.model, chained.vocab = ChainedModel(runner.model, steps, runner.vocab), steps
    output: ForwardOutput = chained.forward(ForwardBatch(first[:, None], ends))
    return output.logits[:, 0]
