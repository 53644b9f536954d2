"""torchao's int8 weights: one sentence without torchao; with it, every method writes the text of `generate`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bass_core import ModelPair, RequestError, generate, load_pair
from bass_core.loading import catalogue
from bass_core.models import select
from bass_core.models.base import CausalModel
from bass_core.models.forward import ForwardBatch
from bass_core.models.llama_cuda import LlamaCuda, Plan
from bass_core.models.llama_int8 import LlamaInt8, fits
from bass_core.models.weights import quantize
from bass_core.models.weights.quantize import int8_weights, is_quantized
from tests.models import prompts, reference, tiny


class Bytes(Tensor):
    """Stands in for torchao's Int8Tensor: int8 values and a scale per row, which a linear layer dequantizes."""

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


def in_bytes(architecture: str = "llama") -> Any:
    model = tiny(architecture)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Bytes(layer.weight), requires_grad=False)
    return model


def test_without_torchao_int8_is_refused_on_a_gpu_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(catalogue, "pick_device", lambda device: torch.device("cuda"))
    with pytest.raises(RequestError, match=r"int8.*torchao.*bfloat16"):
        load_pair("no/such-model", dtype="int8")
    with pytest.raises(RequestError, match=r"int4.*CPU.*int8.*bfloat16"):
        load_pair("no/such-model", dtype="int4")


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an optional extra")
def test_a_quantised_model_runs_its_own_forward() -> None:
    model = tiny("llama")
    full = sum(parameter.nbytes for parameter in model.parameters())
    int8_weights(model)
    assert is_quantized(model)
    pair = ModelPair(model)
    assert type(pair.target_step) is CausalModel and pair.target_step.cost.weight_bytes < full / 2
    rows = prompts(2)
    for method in ("regular", "bass"):
        out = generate(pair, rows, method=method, max_new_tokens=8, eos_token_id=None)
        assert [sequence.token_ids for sequence in out.sequences] == [reference(model, row, 8) for row in rows]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kernels", [False, True])
def test_the_bytes_alone_give_the_same_logits(architecture: str, kernels: bool) -> None:
    """Three rows, and one, against the model's own forward over the dequantized weights."""
    model = in_bytes(architecture)
    assert is_quantized(model) and fits(model) and not fits(tiny(architecture))
    theirs, ours = CausalModel(model), LlamaInt8(model)
    ours.has_kernels = kernels
    caches = ours.new_cache(2, 16), theirs.new_cache(2, 16)
    ids = torch.randint(1, 90, (2, 4), generator=torch.Generator().manual_seed(0))
    for columns, lengths in ((ids, [0, 0]), (ids[:1, :1], [2])):
        mine, expected = (
            step.forward(ForwardBatch(columns, lengths), cache).logits
            for step, cache in zip((ours, theirs), caches, strict=True)
        )
        torch.testing.assert_close(mine, expected, atol=2e-3, rtol=1e-4)
    ours.plan = Plan(most_rows=0)
    torch.testing.assert_close(
        ours.forward(ForwardBatch(ids[:1, :1], [2]), caches[0]).logits, expected, atol=2e-3, rtol=1e-4
    )


def test_the_bytes_are_read_only_where_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (select, sys.modules["bass_core.models.llama_int8"]):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    model = in_bytes()
    assert type(ModelPair(model).target_step) is CausalModel
    monkeypatch.setenv("BASS_INT8_KERNELS", "1")
    step = ModelPair(model).target_step
    assert type(step) is LlamaInt8 and type(ModelPair(tiny("llama")).target_step) is LlamaCuda
    attn = model.model.layers[0].self_attn
    joined = step.blocks[0].qkv.values.untyped_storage().data_ptr()
    assert {part.weight.qdata.untyped_storage().data_ptr() for part in (attn.q_proj, attn.v_proj)} == {joined}


def test_the_version_of_torchaos_weights_that_stays_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def versioned(version: int = 1) -> int:
        return version

    def plain() -> str:
        return "all there was"

    for config, made in ((versioned, 2), (plain, "all there was")):
        monkeypatch.setattr(
            quantize, "require_torchao", lambda config=config: (config, lambda _, what: asked.append(what))
        )
        int8_weights(nn.Linear(2, 2))
        assert asked.pop() == made
