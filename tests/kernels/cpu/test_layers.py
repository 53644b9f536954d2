"""16-bit layers and models are run by these kernels, and say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bass_core import ModelPair
from bass_core.models.llama_compiled import LlamaCompiled, fits
from bass_core.models.llama_cpu import LlamaCpu
from bass_core.models.weights.cpu_linear import PackedLinear

from ...models import tiny
from .shapes import DOTS

TYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_give_what_each_gives(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(40, outs, bias=bias).to(dtype).requires_grad_(False) for outs in (24, 9)]
    x, residual = torch.randn(2, 7, 40), torch.randn(2, 7, 33)
    seen = x.bfloat16().float() if dtype == torch.bfloat16 and any(DOTS) else x
    expected = torch.cat([one.float()(seen) for one in layers], -1)
    linear = PackedLinear(*(one.to(dtype) for one in layers))
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear(x, residual), expected + residual, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear(x.to(dtype)).float(), expected, atol=0.02, rtol=0.02)
    assert linear(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_16_bit_model_is_compiled_and_a_float32_one_is_not(architecture: str) -> None:
    assert type(ModelPair(tiny(architecture)).target_step) is LlamaCpu
    for dtype in TYPES:
        step = ModelPair(tiny(architecture).to(dtype)).target_step
        assert type(step) is LlamaCompiled and not step.low_precision


def test_odd_head_sizes_run_as_before() -> None:
    model = tiny("llama").to(torch.bfloat16)
    model.config.head_dim = 15
    assert not fits(model)
