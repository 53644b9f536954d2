"""Tiny Llama-shaped models of odd shapes and several families, and their forward in float32 for comparison."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from bass_core.model.base import CausalModel
from bass_core.model.cache import RaggedCache
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled
from kernels.cpu import llama, packing
from kernels.cpu.kinds import HAS_DOT

VOCAB = 97
# Whether products are the CPU's bfloat16 ones or in float32. A CPU with bfloat16 products tests both.
DOTS = [False, True] if HAS_DOT else [False]
# (dtype, whether products use bfloat16, whether attention does).
KINDS = [(torch.float16, False, False), (torch.bfloat16, False, False)]
KINDS += [(torch.bfloat16, False, True), (torch.bfloat16, True, True)] if HAS_DOT else []
# (class, hidden size, heads, key-value heads, head dimension, biases). Some sizes are not multiples of 16.
SHAPES: dict[str, tuple[str, int, int, int, int, bool]] = {
    "llama, hidden size 32, heads of 8": ("Llama", 32, 4, 2, 8, False),
    "llama, hidden size 36, heads of 12, biases": ("Llama", 36, 3, 1, 12, True),
    "llama, hidden size 64, heads of 64": ("Llama", 64, 2, 2, 64, False),
    "llama, hidden size 36, groups of 3 heads of 32": ("Llama", 36, 6, 2, 32, False),
    "qwen3, hidden size 64, heads of 20": ("Qwen3", 64, 4, 2, 20, False),
    "qwen3, hidden size 36, heads of 16, biases": ("Qwen3", 36, 6, 3, 16, True),
    "qwen3, hidden size 32, heads of 2": ("Qwen3", 32, 3, 1, 2, False),
    "mistral": ("Mistral", 32, 4, 2, 8, False),
    "qwen2": ("Qwen2", 36, 3, 1, 12, True),
    "phi3": ("Phi3", 48, 4, 2, 12, False),
    "smollm3": ("SmolLM3", 32, 4, 2, 8, False),
    "granite": ("Granite", 36, 6, 2, 8, True),
    "olmo2": ("Olmo2", 36, 4, 2, 12, False),
}
FAMILIES = list(SHAPES)[7:]
# Settings of a shape's config: with the usual ones some families would be plain Llamas.
_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.7}
_SETTINGS: dict[str, dict[str, Any]] = {
    # 8 of 12 numbers of each head are rotated, from 200 tokens on by other angles.
    "phi3": {
        "original_max_position_embeddings": 200,
        "rope_parameters": _ROPE | {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    },
    "smollm3": {"no_rope_layers": [0, 1, 0]},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.6, "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "mistral": {"sliding_window": 256},
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype, layers: int = 2, **others: Any) -> Any:
    """Return a random model of a shape, with random norms and biases. others: settings of its config."""
    kind, hidden, heads, kv_heads, dim, bias = SHAPES[name]
    torch.manual_seed(3)
    config = getattr(tf, f"{kind}Config")(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **{"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
        | {"intermediate_size": 50, "max_position_embeddings": 256}
        | _SETTINGS.get(name, {})
        | others,
    )
    model = getattr(tf, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def compiled(model: Any, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch) -> LlamaCompiled:
    """Return the compiled model. `fast`: its products use bfloat16. `dot`: its attention does."""
    monkeypatch.setattr(packing, "FAST_DOT", fast)
    monkeypatch.setattr(llama, "HAS_DOT", dot)
    return LlamaCompiled(model)


def exact(model: Any) -> CausalModel:
    """Return transformers' forward with the same weights in float32."""
    return CausalModel(copy.deepcopy(model).float())


def tokens(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def forward_logits(model: CausalModel, cache: RaggedCache, ids: Tensor, lengths: list[int], **rest: Any) -> Tensor:
    """Return a copy of the logits of one forward."""
    return model.forward(ForwardBatch(ids, lengths, **rest), cache).logits.clone()
