"""Where the CPU's own kernels can't serve, transformers' own model runs, writes its own texts, and is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bass_core import ModelPair, SamplingParams, generate
from bass_core.machine import cpu_kernels
from bass_core.model.base import CausalModel
from bass_core.model.loading import catalogue

from ...models import perturbed, prompts, reference, tiny
from ..draft.test_head import tiny_head

REASON = "numba can't be imported (No module named 'numba')"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without numba."""
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    monkeypatch.setattr(cpu_kernels, "why_unavailable", lambda: REASON)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_own_layers_multiply(without: None, architecture: str, dtype: torch.dtype) -> None:
    model = tiny(architecture).to(dtype)
    pair = ModelPair(model, perturbed(model, 0.03))
    step = pair.target_step
    assert type(step) is CausalModel and step.low_precision == (dtype != torch.float32)
    ours, theirs = ([type(one) for one in made.modules()] for made in (step._shadow, model))
    assert ours == theirs
    out = generate(pair, prompts(3), draft_length=3, max_new_tokens=8, eos_token_id=None)
    assert all(len(one.token_ids) == 8 for one in out.sequences)
    if dtype == torch.float32:
        assert [one.token_ids for one in out.sequences] == [reference(model, row, 8) for row in prompts(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [1, 3])
def test_a_head_drafts_with_the_models_own_layers(without: None, positions: int, dtype: torch.dtype) -> None:
    target = tiny("llama").to(dtype)
    head = tiny_head(target, positions=positions).to(dtype)
    pair = ModelPair(target, head)
    assert type(pair.draft_step) is CausalModel and isinstance(head.fuse, nn.Linear)
    sampling = SamplingParams(temperature=0.8)
    for tree in (None, (2, 1)):
        out = generate(pair, prompts(3), max_new_tokens=12, eos_token_id=None, sampling=sampling, tree=tree)
        assert all(len(one.token_ids) == 12 for one in out.sequences)


def test_it_is_said_what_runs(without: None) -> None:
    assert str(ModelPair(tiny("llama").to(torch.bfloat16))).endswith(f"cpu, transformers' own model ({REASON}))")


@pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
def test_it_is_said_why_a_model_is_not_computed_by_the_kernels() -> None:
    model = tiny("llama").to(torch.bfloat16)
    assert ModelPair(model).computed_by == "own kernels"
    model.lm_head.to(torch.float16)
    for other, reason in (
        (model, "our kernels don't know this form of weights"),
        (tiny("llama"), "our kernels take 16 bits and fewer"),
        (tiny("gpt2").to(torch.bfloat16), "our kernels know Llama and Qwen3, without adapters"),
    ):
        assert ModelPair(other).computed_by == f"transformers' own model ({reason})"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_auto_is_float32_where_nothing_multiplies_bfloat16(
    kernels: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "available", lambda: kernels)
    monkeypatch.setattr(catalogue, "native_bfloat16", lambda: native)
    expected = torch.bfloat16 if kernels or native else torch.float32
    assert catalogue.default_dtype(torch.device("cpu")) == expected
