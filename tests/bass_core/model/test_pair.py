"""What makes a pair, what is refused, and that the models handed in stay unchanged."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from bass_core import ModelPair, PairError, RequestError, generate
from bass_core.model import select
from bass_core.model.base import CausalModel
from bass_core.model.llama_cuda import LlamaCuda

from ...models import prompts, reference, tiny

ROOT = Path(__file__).parents[3]


def test_the_models_stay_ordinary_transformers_models():
    target = tiny("qwen3")
    prompt = prompts(1)[0]
    before = reference(target, prompt, 12)
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    attention = target.config._attn_implementation
    made = ModelPair(target, target)
    during = []
    thread = threading.Thread(target=lambda: generate(made, prompts(4), max_new_tokens=60))
    thread.start()
    while thread.is_alive():
        during.append(reference(target, prompt, 12))
    thread.join()
    assert during and all(text == before for text in during)
    assert reference(target, prompt, 12) == before
    assert target.config._attn_implementation == attention
    assert all(torch.equal(weights[name], tensor) for name, tensor in target.state_dict().items())


def test_vocabularies_must_agree():
    target, draft = tiny("llama"), tiny("llama", seed=1)
    draft.resize_token_embeddings(80)
    with pytest.raises(PairError, match="80 ids and the target's 96"):
        ModelPair(target, draft)


def test_what_cannot_be_supported_is_refused_by_name():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    for model in (mamba, t5):
        with pytest.raises(PairError, match=type(model).__name__):
            ModelPair(model)


def test_a_pair_without_a_draft_refuses_the_model_drafter():
    with pytest.raises(RequestError, match="no draft model"):
        generate(ModelPair(tiny("llama")), [1, 2], drafter="model")


def test_weights_are_joined_on_a_gpu_and_left_alone_on_zero_gpu(monkeypatch: pytest.MonkeyPatch):
    assert type(ModelPair(tiny("llama")).target_step) is CausalModel
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    assert type(ModelPair(tiny("llama")).target_step) is LlamaCuda
    assert type(ModelPair(tiny("gpt2")).target_step) is CausalModel
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert type(ModelPair(tiny("llama")).target_step) is CausalModel


def test_transformers_imports_beside_our_kernels_folder():
    code = "import kernels; import transformers.models.llama.modeling_llama; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"
