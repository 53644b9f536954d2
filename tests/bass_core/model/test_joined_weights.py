"""Weights joined for a GPU are stored once, and the user's model still works as before.

A CPU is treated as an accelerator here, so that the parameters become views of the joined weights.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bass_core.model import llama_cuda as gpu_model
from bass_core.model.llama_cuda import LlamaCuda
from tests.support.models import prompts, reference, tiny, tiny_head


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model, "is_accelerator", lambda device: True)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storage_bytes(*tensors: Tensor) -> int:
    """Return the total bytes of the tensors' storages, each storage counted once."""
    return sum({storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def weights_of(step: LlamaCuda) -> list[Tensor]:
    layers = [(layer.qkv, layer.gate_up, layer.output, layer.down) for layer in step.blocks]
    return [step.embedding, step.head, *(weight for layer in layers for weight in layer)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_joined_model_is_stored_once_and_writes_the_same_text(architecture: str) -> None:
    model, prompt = tiny(architecture), prompts(1)[0]
    before, text = storage_bytes(*model.parameters()), reference(model, prompt, 12)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    step = LlamaCuda(model)
    assert storage_bytes(*model.parameters(), *weights_of(step)) == before
    assert all(ours is theirs for ours, theirs in zip(parameters, model.parameters(), strict=True))
    assert reference(model, prompt, 12) == text
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    for ours, theirs in zip(weights_of(step), weights_of(LlamaCuda(model)), strict=True):
        assert storage(ours) == storage(theirs), "a second pair of the same model joins nothing again"
    attn = model.model.layers[1].self_attn
    assert {storage(part.weight) for part in (attn.q_proj, attn.k_proj, attn.v_proj)} == {
        storage(step.blocks[1].qkv)
    }


def test_tied_embeddings_stay_tied() -> None:
    config = tiny("llama").config
    config.tie_word_embeddings = True
    model = type(tiny("llama"))(config).eval()
    step = LlamaCuda(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert storage(step.head) == storage(step.embedding) == storage(model.lm_head.weight)


def test_a_joined_model_can_be_saved_copied_and_trained(tmp_path: Path) -> None:
    model = tiny("llama").requires_grad_(True)
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        step = LlamaCuda(model)
    assert model.model.layers[1].self_attn.q_proj.weight is model.model.layers[0].self_attn.q_proj.weight
    torch.save(model.state_dict(), tmp_path / "state")
    for name, value in torch.load(tmp_path / "state").items():
        assert torch.equal(values[name], value), name
    copy.deepcopy(model).load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})
    up = "model.layers.0.mlp.up_proj.weight"
    weight = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, values[up]) and weight.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[5, 6, 7]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    # Training and loading in place change the weights that the forward reads.
    assert not torch.equal(weight, values[up]) and torch.equal(step.blocks[0].gate_up[128:], weight)
    model.load_state_dict(values)
    assert torch.equal(step.blocks[0].gate_up[128:], values[up])


def test_joined_models_and_heads_are_saved_unchanged(tmp_path: Path) -> None:
    model = tiny("llama")
    LlamaCuda(model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], value) for name, value in tiny("llama").state_dict().items())
    head = tiny_head(tiny("llama")).to(torch.bfloat16)
    names = set(head.own_weights())
    LlamaCuda(head.body)
    head.save(tmp_path / "head", torch.bfloat16)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert names | {"vocabulary"} == set(stored)
    up = "body.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(stored[up], dict(head.named_parameters())[up])
