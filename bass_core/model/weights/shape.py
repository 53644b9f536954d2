"""What a model's config says of its shape.

Contract: reads classes and configs, and runs nothing. `is_llama` names the models that our own forwards compute
(model/llama_cpu.py on a CPU, model/llama_cuda.py on a GPU); all others run by transformers' own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .quantized import QuantizedLinear

# What holds a weight in 16 bits.
HALVES = (torch.bfloat16, torch.float16)
_CLASSES = {"LlamaForCausalLM", "Qwen3ForCausalLM"}


def is_llama(model: PreTrainedModel) -> bool:
    """Whether the model is a Llama or a Qwen3, without windows, adapters and unknown rotary embeddings."""
    config = model.config
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    # No others, such as an adapter's, of which our forwards know nothing.
    linears = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    return (
        type(model).__name__ in _CLASSES
        and linears == 7 * config.num_hidden_layers + 1
        and config.hidden_act == "silu"
        and set(_rope_types(config)) <= {"", "default", "linear", "llama3"}
        and not windows
    )


def turns_with_length(config: Any) -> bool:
    """Whether the rotary embeddings depend on the text's length, which transformers reads on the host."""
    return any("dynamic" in name or name == "longrope" for name in _rope_types(config))


def _rope_types(config: Any) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters for all layers, or one for each type of layer.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [str(kind.get("rope_type", kind.get("type", ""))) for kind in kinds]


def head_dim(config: Any) -> int:
    """The size of an attention head."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads
