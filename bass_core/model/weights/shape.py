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
# transformers' own classes: another package's class of the same name may compute anything.
_CLASSES = {
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}ForCausalLM"
    for family in ("Llama", "Qwen3")
}


def is_llama(model: PreTrainedModel) -> bool:
    """Whether the model is a Llama or a Qwen3, without windows, adapters and unknown rotary embeddings."""
    config = model.config
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    # No others, such as an adapter's, of which our forwards know nothing.
    linears = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    return (
        f"{type(model).__module__}.{type(model).__qualname__}" in _CLASSES
        and linears == 7 * config.num_hidden_layers + 1
        and config.hidden_act == "silu"
        and set(_rope_types(config)) <= {"", "default", "linear", "llama3"}
        and not windows
    )


def said(config: Any, name: str) -> Any:
    """What a config says; None where it says nothing, or says it of each layer apart (its getter then raises)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def turns_with_length(config: Any) -> bool:
    """Whether the rotary embeddings depend on the text's length, which transformers reads on the host."""
    return any("dynamic" in name or name == "longrope" for name in _rope_types(config))


def context_of(config: Any) -> int:
    """The most tokens of a text that a model computes; 2048, Bloom's, if the config does not say.

    Longrope turns all tokens by other angles once the longest text of a batch outgrows the original length. Up to
    there every text has the same angles alone and in any batch.
    """
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    context: int = next((value for name in names if (value := said(config, name))), 2048)
    originals = [
        kind.get("original_max_position_embeddings") or said(config, "original_max_position_embeddings")
        for kind in _ropes(config)
        if _rope_type(kind) == "longrope"
    ]
    # XLNet's -1 says that there is no limit.
    return min(int(one) for one in (context if context > 0 else 2048, *originals) if one)


def _ropes(config: Any) -> list[dict[str, Any]]:
    rope = said(config, "rope_parameters") or said(config, "rope_scaling") or {}
    # One set of parameters for all layers, or one for each type of layer.
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "")))


def _rope_types(config: Any) -> list[str]:
    return [_rope_type(rope) for rope in _ropes(config)]


def head_dim(config: Any) -> int:
    """The size of an attention head; 0 if the config does not say."""
    own: int | None = said(config, "head_dim")
    return own or (said(config, "hidden_size") or 0) // (said(config, "num_attention_heads") or 1)
