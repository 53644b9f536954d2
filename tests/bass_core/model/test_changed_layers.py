"""Models whose layers are not those that their class was written with: adapters, and several dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bass_core import ModelPair
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch

from ...models import tiny

IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Adapter(nn.Module):
    """A linear layer and a low-rank term, in the form of PEFT's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        inputs, outputs = layer.in_features, layer.out_features
        self.low = nn.ModuleDict({"a": nn.Linear(inputs, 4, bias=False), "b": nn.Linear(4, outputs, bias=False)})
        self.low.to(layer.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        low: Any = self.low
        term: Tensor = low["b"](low["a"](x.to(low["a"].weight.dtype)))
        return self.base_layer(x) + 8 * term


def close(model: Any, error: float) -> None:
    step = ModelPair(model).target_step
    ours = step.forward(ForwardBatch(IDS, [0]), step.new_cache(1, 8)).logits
    with torch.no_grad():
        theirs = model(IDS).logits.float()
    assert (ours.float() - theirs).abs().max() < error * theirs.abs().max()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_an_adapter_s_term_is_not_lost(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    model: Any = tiny("llama").to(dtype)
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    assert type(ModelPair(model).target_step) is CausalModel
    close(model, error)


@pytest.mark.parametrize("head", [torch.float16, torch.float32])
def test_an_output_layer_of_another_dtype(head: torch.dtype) -> None:
    model: Any = tiny("llama").to(torch.bfloat16)
    model.lm_head.to(head)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(head),))
    close(model, 0.1)
