"""Pairs: which models are accepted, which code runs them, and that the user's models stay unchanged.

If the CPU kernels can't run a model, transformers' own model runs. Layers that are not of the model's class, e.g.
adapters, are computed too.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import RwkvConfig, RwkvForCausalLM, T5Config, T5ForConditionalGeneration

from bass_core import ModelPair, PairError, SamplingParams, generate
from bass_core.machine import cpu_kernels
from bass_core.model import select
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.pair import check_same_tokens
from tests.support import ROOT
from tests.support.models import prompts, reference, texts_of, tiny, tiny_head, tiny_pair


def test_models_of_a_pair_stay_ordinary_transformers_models():
    target = tiny("qwen3")
    prompt = prompts(1)[0]
    before = reference(target, prompt, 12)
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    attention = target.config._attn_implementation
    pair = ModelPair(target, target)
    during = []
    thread = threading.Thread(target=lambda: generate(pair, prompts(4), max_new_tokens=60))
    thread.start()
    while thread.is_alive():
        during.append(reference(target, prompt, 12))
    thread.join()
    assert during and all(text == before for text in during)
    assert reference(target, prompt, 12) == before
    assert target.config._attn_implementation == attention
    assert all(torch.equal(weights[name], tensor) for name, tensor in target.state_dict().items())


def test_the_cache_argument_has_the_name_in_the_models_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 renamed "past_key_values" to "cache", and 5.40 drops the old name.

    Our calls pass the cache. Only the trial at load also calls the model without a cache, with a mask instead.
    """
    target = tiny("llama")
    forward = type(target).forward
    parameters = inspect.signature(forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"

    def new(self: Any, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        assert "past_key_values" not in others and (cache is not None or "attention_mask" in others)
        return forward(self, input_ids, **{name: cache}, **others)

    def old(self: Any, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        assert "cache" not in others and (past_key_values is not None or "attention_mask" in others)
        return forward(self, input_ids, **{name: past_key_values}, **others)

    def either(self: Any, *args: Any, **others: Any) -> Any:
        assert name in others or "attention_mask" in others
        return forward(self, *args, **others)

    texts = []
    for other in (forward, new, old, either):
        monkeypatch.setattr(type(target), "forward", other)
        output = generate(ModelPair(target, target), prompts(2), max_new_tokens=8)
        texts.append(texts_of(output))
    assert all(text == texts[0] for text in texts)


def test_vocabularies_must_agree():
    target, draft = tiny("llama"), tiny("llama", seed=1)
    draft.resize_token_embeddings(80)
    with pytest.raises(PairError, match="80 ids and the target's 96"):
        ModelPair(target, draft)


@pytest.mark.parametrize(
    ("ids", "named"),
    [(151936, "Qwen/Qwen3-0.6B"), (49152, "SmolLM2-135M"), (96, "smaller model of the target's own")],
)
def test_the_refusal_of_another_tokenizer_names_drafts_that_fit(ids: int, named: str):
    ours, theirs = ({f"{word}{i}": i for i in range(ids)} for word in ("a", "b"))
    with pytest.raises(PairError, match=f"differs from the target's in {ids} tokens: choose") as refusal:
        check_same_tokens(*(SimpleNamespace(get_vocab=lambda words=words: words) for words in (ours, theirs)))
    assert named in str(refusal.value) and 'drafter="prompt_lookup"' in str(refusal.value)


def test_unsupported_models_are_refused_by_name():
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    for model in (rwkv, t5):
        with pytest.raises(PairError, match=type(model).__name__):
            ModelPair(model)


def test_models_without_values_are_refused() -> None:
    with pytest.raises(PairError, match="on the device meta"):
        ModelPair(tiny("llama").to("meta"))


def test_weights_are_joined_on_a_gpu_but_not_on_zero_gpu(monkeypatch: pytest.MonkeyPatch):
    assert type(ModelPair(tiny("llama")).target_step) is CausalModel
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    assert type(ModelPair(tiny("llama")).target_step) is LlamaCuda
    assert type(ModelPair(tiny("gpt2")).target_step) is CausalModel
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert type(ModelPair(tiny("llama")).target_step) is CausalModel


@pytest.mark.slow
def test_our_kernels_folder_does_not_hide_the_one_of_transformers():
    code = "import kernels; import transformers.models.llama.modeling_llama; print(kernels.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "kernels" / "__init__.py"


IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Adapter(nn.Module):
    """A linear layer with a low-rank term, like PEFT's."""

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


def assert_close_to_the_model(model: Any, error: float) -> None:
    step = ModelPair(model).target_step
    ours = step.forward(ForwardBatch(IDS, [0]), step.new_cache(1, 8)).logits
    with torch.no_grad():
        theirs = model(IDS).logits.float()
    assert (ours.float() - theirs).abs().max() < error * theirs.abs().max()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_an_adapters_term_is_computed(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    model: Any = tiny("llama").to(dtype)
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    assert type(ModelPair(model).target_step) is CausalModel
    assert_close_to_the_model(model, error)


def test_an_output_layer_may_have_another_dtype() -> None:
    for head in (torch.float16, torch.float32):
        model: Any = tiny("llama").to(torch.bfloat16)
        model.lm_head.to(head)
        model.lm_head.register_forward_pre_hook(lambda _, inputs, head=head: (inputs[0].to(head),))
        assert_close_to_the_model(model, 0.1)


REASON = "numba can't be imported (No module named 'numba')"


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without numba."""
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    monkeypatch.setattr(cpu_kernels, "why_unavailable", lambda: REASON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_numba_the_models_own_layers_multiply(without_numba: None, dtype: torch.dtype) -> None:
    for architecture in ("llama", "gpt2"):
        model = tiny(architecture).to(dtype)
        pair = tiny_pair(0.03, target=model)
        step = pair.target_step
        assert type(step) is CausalModel and step.low_precision == (dtype != torch.float32)
        if (architecture, dtype) == ("llama", torch.bfloat16):
            assert str(pair).endswith(f"cpu, transformers' own model ({REASON}))")
        ours, theirs = ([type(module) for module in each.modules()] for each in (step._shadow, model))
        assert ours == theirs
        output = generate(pair, prompts(3), draft_length=3, max_new_tokens=8, eos_token_id=None)
        assert all(len(sequence.token_ids) == 8 for sequence in output.sequences)
        if dtype == torch.float32:
            assert texts_of(output) == [reference(model, row, 8) for row in prompts(3)]


def test_without_numba_a_head_drafts_with_the_models_own_layers(without_numba: None) -> None:
    target = tiny("llama").to(torch.bfloat16)
    head = tiny_head(target).to(torch.bfloat16)
    pair = ModelPair(target, head)
    assert type(pair.draft_step) is CausalModel and isinstance(head.fuse, nn.Linear)
    sampling = SamplingParams(temperature=0.8)
    for tree in (None, (2, 1)):
        output = generate(pair, prompts(3), max_new_tokens=12, eos_token_id=None, sampling=sampling, tree=tree)
        assert all(len(sequence.token_ids) == 12 for sequence in output.sequences)


@pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
def test_computed_by_names_the_code_and_the_reason() -> None:
    model = tiny("llama").to(torch.bfloat16)
    tiles = " with AMX" if cpu_kernels.has_tiles() else ""
    assert ModelPair(model).computed_by == f"own kernels{tiles}" and f"own kernels{tiles}" in repr(
        ModelPair(model)
    )
    assert ModelPair(tiny("llama").to(torch.float16)).computed_by == "own kernels"
    model.lm_head.to(torch.float16)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.float16),))
    for other, reason in (
        (model, "our kernels don't know this form of weights"),
        (tiny("llama"), "our kernels take 16 bits and fewer"),
        (
            tiny("gpt2").to(torch.bfloat16),
            "our kernels know Llama, Mistral, Qwen2, Qwen3, Phi3, SmolLM3, Granite and Olmo2",
        ),
    ):
        assert ModelPair(other).computed_by == f"transformers' own model ({reason})"
