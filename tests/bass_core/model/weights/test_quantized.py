"""Weights of four and eight bits on a CPU: their layers, their sizes, and the same text by every method.

Activations are float32 here, so that texts are equal on any CPU.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bass_core import ModelPair, PairError, SamplingParams, generate
from bass_core.decode.cost_store import costs_path
from bass_core.draft.registry import DRAFTERS
from bass_core.model import select
from bass_core.model.base import CausalModel
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.weights.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    is_quantized,
    quantise_model,
    weight_of,
)
from kernels.reference.quantized import QuantizedWeight, dequantise, quantise_q8_0
from tests.support.models import prompts, reference, texts_of, tiny
from tests.support.schedule import draft_in_step

ROWS = prompts(3)
OTHER_ARCHITECTURES = ("qwen3", "opt", "gpt_neox", "gemma3")


def quantised(architecture: str, name: str, tied: bool = False) -> Any:
    model = tiny(architecture)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    quantise_model(model, name)
    return model


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_ARCHITECTURES)]
)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_method_writes_the_text_of_the_models_own_forward(architecture: str, name: str) -> None:
    model = quantised(architecture, name)
    pair = ModelPair(model, quantised(architecture, "int8"))
    expected = [reference(model, row, 12) for row in ROWS]
    assert expected != [reference(tiny(architecture), row, 12) for row in ROWS] or name == "int8"
    for method in ("regular", "speculative", "bass"):
        output = generate(pair, ROWS, method=method, max_new_tokens=12, eos_token_id=None)
        assert texts_of(output) == expected, method


def test_amusd_drafts_with_a_quantised_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_in_step(monkeypatch)
    model = quantised("llama", "int4")
    pair = ModelPair(model, quantised("llama", "int8"))
    output = generate(pair, ROWS, method="amusd", max_new_tokens=12, eos_token_id=None)
    assert output.timeline is not None and output.timeline["note"] is None and output.metrics.drafted > 0
    assert texts_of(output) == [reference(model, row, 12) for row in ROWS]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_layers_and_embeddings_are_replaced_and_their_bytes_counted(name: str, tied: bool) -> None:
    plain = tiny("llama")
    linears = [module for module in plain.modules() if isinstance(module, nn.Linear)]
    model = quantised("llama", name, tied)
    assert not any(isinstance(module, (nn.Linear, nn.Embedding)) for module in model.modules())
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert type(head) is QuantizedLinear and type(table) is QuantizedEmbedding
    assert (weight_of(head) is weight_of(table)) == tied
    kinds = {module.quantized.kind for module in model.model.modules() if isinstance(module, QuantizedLinear)}
    end_kind = "int8" if name == "int8" else "q8_0"
    assert kinds == {"int8" if name == "int8" else "q4_1"} and {weight_of(head).kind, weight_of(table).kind} == {
        end_kind
    }
    assert (head.in_features, head.out_features, head.weight.dtype) == (64, 96, torch.float32)
    torch.testing.assert_close(head(torch.eye(64)).T, head.weight)
    assert torch.equal(table(torch.tensor([[5, 2]])), table.weight[torch.tensor([[5, 2]])])
    cost, count = ModelPair(model).target_step.cost, sum(layer.weight.numel() for layer in linears)
    norms = sum(weight.numel() for weight in plain.parameters() if weight.dim() == 1)
    assert cost.parameters == count + norms
    assert cost.weight_bytes == 4 * norms + sum(
        layer.weight.numel() + 4 * layer.out_features
        if name == "int8"
        else layer.weight.numel() // 32 * (34 if layer is plain.lm_head else 20)
        for layer in linears
    )


def test_the_plain_weights_are_freed() -> None:
    model = tiny("llama")
    matrices = [weakref.ref(weight) for weight in model.parameters() if weight.dim() > 1]
    quantise_model(model, "int4")
    pair = ModelPair(model)
    gc.collect()
    assert len(matrices) == 16 and not any(weight() is not None for weight in matrices)
    step: Any = pair.target_step
    ours, theirs = step._shadow.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj
    assert ours is not theirs and ours.quantized is theirs.quantized


def test_given_quantised_weights_are_used() -> None:
    model = tiny("llama")
    ready = quantise_q8_0(torch.randn(64, 64))
    quantise_model(model, "int4", {"model.layers.1.self_attn.q_proj": ready})
    assert model.model.layers[1].self_attn.q_proj.quantized is ready
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, dequantise(ready))
    wrong = QuantizedWeight("q8_0", ready.values[:32], ready.scales[:32])
    with pytest.raises(PairError, match=r"q_proj.*32, 64.*64, 64"):
        quantise_model(tiny("llama"), "int4", {"model.layers.1.self_attn.q_proj": wrong})


def test_biases_positions_and_embeddings_of_other_classes_are_not_quantised() -> None:
    before, after = tiny("opt"), quantised("opt", "int4")
    layer = after.model.decoder.layers[0].fc1
    assert layer.bias is not None and torch.equal(layer.bias, before.model.decoder.layers[0].fc1.bias)
    assert isinstance(after.model.decoder.embed_positions, nn.Embedding)
    gemma = quantised("gemma3", "int8", tied=True)
    assert isinstance(gemma.get_input_embeddings(), nn.Embedding) and is_quantized(gemma)
    table = gemma.get_input_embeddings().weight
    others = [weight.nbytes for weight in gemma.parameters() if weight is not table]
    quantised_bytes = [
        module.quantized.nbytes for module in gemma.modules() if isinstance(module, QuantizedLinear)
    ]
    assert ModelPair(gemma).target_step.cost.weight_bytes == sum(others) + sum(quantised_bytes)


def test_models_that_cannot_be_quantised_are_refused_with_a_choice() -> None:
    with pytest.raises(PairError, match=r"^GPT2LMHeadModel .*int8.*c_attn is a Conv1D.*: choose bfloat16\.$"):
        quantise_model(tiny("gpt2"), "int8")
    model = tiny("llama")
    model.model.layers[0].mlp.down_proj = nn.Linear(48, 64, bias=False)
    with pytest.raises(PairError, match=r"int4.*down_proj.*blocks of 32 inputs: choose int8 or bfloat16\.$"):
        quantise_model(copy.deepcopy(model), "int4")
    quantise_model(model, "int8")


def test_names_and_costs_distinguish_the_quantisations() -> None:
    pairs = [ModelPair(model) for model in (tiny("llama"), quantised("llama", "int8"), quantised("llama", "int4"))]
    assert [pair.weight_dtype for pair in pairs] == ["float32", "int8", "int4"]
    assert all(pair.dtype == torch.float32 and pair.weight_dtype in repr(pair) for pair in pairs)
    # The int8 and int4 pairs run in the same class and differ only in their weights.
    assert len({costs_path(pair, DRAFTERS["prompt_lookup"], "pad", SamplingParams()) for pair in pairs}) == 3


class ForeignInt8(Tensor):
    """Another package's int8 tensor: values and a scale per row, which a linear layer dequantises."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> ForeignInt8:
        tensor: ForeignInt8 = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        tensor.scale = weight.detach().abs().amax(1, keepdim=True) / 127
        tensor.qdata = (weight.detach() / tensor.scale).round().to(torch.int8)
        return tensor

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


def test_weights_quantised_by_another_package_run_the_models_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator runs the model's own code too: our forward would join the weights as if they were plain."""
    model = tiny("llama")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(ForeignInt8(layer.weight), requires_grad=False)
    pair, rows = ModelPair(model), prompts(2)
    assert type(pair.target_step) is CausalModel and pair.weight_dtype == "int8"
    assert pair.target_step.cost.weight_bytes < ModelPair(tiny("llama")).target_step.cost.weight_bytes / 2
    for method in ("regular", "bass"):
        output = generate(pair, rows, method=method, max_new_tokens=8, eos_token_id=None)
        assert texts_of(output) == [reference(model, row, 8) for row in rows]
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    assert type(ModelPair(model).target_step) is CausalModel
    assert type(ModelPair(tiny("llama")).target_step) is LlamaCuda
