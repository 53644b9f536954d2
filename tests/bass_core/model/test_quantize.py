"""Quantised weights on a GPU: ours are refused in one sentence, another package's run the model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bass_core import ModelPair, RequestError, generate, load_pair
from bass_core.model import select
from bass_core.model.base import CausalModel
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.loading import catalogue
from tests.models import prompts, reference, tiny


class Bytes(Tensor):
    """Another package's int8 tensor: values and a scale per row, which a linear layer dequantizes."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Bytes:
        made: Bytes = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.scale = weight.detach().abs().amax(1, keepdim=True) / 127
        made.qdata = (weight.detach() / made.scale).round().to(torch.int8)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, values: Any, options: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default, function
        return values[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, values: Any, options: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = values
            return F.linear(x, weight.qdata.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(function, types, values, options or {})


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_ours_are_refused_on_a_gpu_before_anything_is_loaded(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "pick_device", lambda device: torch.device("cuda"))
    with pytest.raises(RequestError, match=rf'^dtype="{dtype}" is for a CPU: choose bfloat16, or device="cpu"\.$'):
        load_pair("no/such-model", dtype=dtype)


def test_those_of_another_package_run_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on an accelerator, whose own forward would join plain weights."""
    model = tiny("llama")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Bytes(layer.weight), requires_grad=False)
    pair, rows = ModelPair(model), prompts(2)
    assert type(pair.target_step) is CausalModel and pair.weight_dtype == "int8"
    assert pair.target_step.cost.weight_bytes < ModelPair(tiny("llama")).target_step.cost.weight_bytes / 2
    for method in ("regular", "bass"):
        out = generate(pair, rows, method=method, max_new_tokens=8, eos_token_id=None)
        assert [sequence.token_ids for sequence in out.sequences] == [reference(model, row, 8) for row in rows]
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    assert type(ModelPair(model).target_step) is CausalModel
    assert type(ModelPair(tiny("llama")).target_step) is LlamaCuda
