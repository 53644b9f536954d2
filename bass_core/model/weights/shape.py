"""Read a model's shape from its class and config; nothing is run.

`is_llama` recognises the models that our own forwards compute (model/llama_cpu.py on a CPU, model/llama_cuda.py on
a GPU). All others run transformers' own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .quantized import QuantizedLinear

# 16-bit dtypes of weights.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
# Full names, because another package's class of the same name may compute anything.
_CLASSES = {
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}ForCausalLM"
    for family in ("Llama", "Qwen3")
}


def is_llama(model: PreTrainedModel) -> bool:
    """Return whether this is a Llama or Qwen3 without sliding windows, adapters or unknown rotary embeddings."""
    config = model.config
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    # Additional linear layers, e.g. an adapter's, would be ignored by our forwards.
    linears = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    return (
        f"{type(model).__module__}.{type(model).__qualname__}" in _CLASSES
        and linears == 7 * config.num_hidden_layers + 1
        and config.hidden_act == "silu"
        and set(_rope_types(config)) <= {"", "default", "linear", "llama3"}
        and not windows
    )


def config_value(config: Any, name: str) -> Any:
    """Return a config's value, or None if it is missing or differs between layers (its getter then raises)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def rope_depends_on_length(config: Any) -> bool:
    """Return whether rotary embeddings depend on the text's length, which transformers reads on the host."""
    return any("dynamic" in name or name == "longrope" for name in _rope_types(config))


def context_of(config: Any) -> int:
    """Return the maximum number of tokens in a text; 2048, as for Bloom, if the config has no limit.

    For longrope, return the original length. In a batch with a longer text, all tokens get other angles, so a
    row's logits would depend on the other rows.
    """
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    context: int = next((value for name in names if (value := config_value(config, name))), 2048)
    originals = [
        kind.get("original_max_position_embeddings") or config_value(config, "original_max_position_embeddings")
        for kind in _ropes(config)
        if _rope_type(kind) == "longrope"
    ]
    # XLNet writes -1 for "no limit".
    return min(int(limit) for limit in (context if context > 0 else 2048, *originals) if limit)


def _ropes(config: Any) -> list[dict[str, Any]]:
    rope = config_value(config, "rope_parameters") or config_value(config, "rope_scaling") or {}
    # One set of parameters for all layers, or one for each type of layer.
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "")))


def _rope_types(config: Any) -> list[str]:
    return [_rope_type(rope) for rope in _ropes(config)]


def head_dim(config: Any) -> int:
    """Return the size of an attention head; 0 if the config doesn't have it."""
    configured: int | None = config_value(config, "head_dim")
    return configured or (config_value(config, "hidden_size") or 0) // (
        config_value(config, "num_attention_heads") or 1
    )
