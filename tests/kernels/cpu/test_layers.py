"""The CPU kernels run 16-bit layers and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bass_core import ModelPair, load_pair
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled, why_not
from bass_core.model.weights.compiled import CompiledLinear, compiled
from kernels.cpu.kinds import FAST_DOT
from tests.support.models import tiny

TYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_s_product_is_the_same_for_any_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 33, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(7, 40)
    seen = x.bfloat16().float() if dtype == torch.bfloat16 and FAST_DOT else x
    linear = compiled(layer)
    whole = linear(x)
    torch.testing.assert_close(whole, layer.float()(seen), atol=1e-5, rtol=1e-5)
    for rows in range(1, 7):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    torch.testing.assert_close(linear(x.to(dtype)).float(), whole, atol=0.02, rtol=0.02)
    assert linear(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_16_bit_model_is_compiled_and_a_float32_one_is_not(architecture: str) -> None:
    assert type(ModelPair(tiny(architecture)).target_step) is CausalModel
    for dtype in TYPES:
        step = ModelPair(tiny(architecture).to(dtype)).target_step
        assert type(step) is LlamaCompiled and not step.low_precision


@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_multiply_the_layers_of_other_models(dtype: torch.dtype) -> None:
    model = tiny("opt").to(dtype)
    step = ModelPair(model).target_step
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    packed = {name: module for name, module in step._shadow.named_modules() if isinstance(module, CompiledLinear)}
    assert linears and sorted(packed) == sorted(linears) and step.low_precision
    for name, module in packed.items():
        layer: Any = model.get_submodule(name)
        x = torch.randn(2, layer.in_features)
        torch.testing.assert_close(module(x), layer.float()(x), atol=0.05, rtol=0.05)


def test_models_with_odd_head_sizes_are_not_compiled() -> None:
    model = tiny("llama").to(torch.bfloat16)
    model.config.head_dim = 15
    assert why_not(model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_logits_are_near_bfloat16_and_equal_at_any_width(smollm2_folder: Path, dtype: str) -> None:
    ids = torch.randint(0, 49_152, (2, 5), generator=torch.Generator().manual_seed(0))
    logits = []
    for precision in ("bfloat16", dtype):
        model = load_pair("smollm2", device="cpu", dtype=precision).target_step
        cache = model.new_cache(2, 8)
        whole = model.forward(ForwardBatch(ids, [0, 0]), cache).logits.clone()
        steps = [model.forward(ForwardBatch(ids[:, i : i + 1], [i, i]), cache).logits.clone() for i in range(5)]
        assert torch.equal(torch.cat(steps, 1), whole)
        logits.append(whole)
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.1
