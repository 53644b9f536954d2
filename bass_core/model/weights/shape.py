"""Read a model's shape from its modules and config; nothing is run.

`describe` returns what our own forwards need to know of a model (model/llama_cpu.py on a CPU, model/llama_cuda.py
on a GPU), or why they can't compute it. Such models run transformers' own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .quantized import QuantizedLinear

# 16-bit dtypes of weights.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
# The families whose code we have read: `describe` tells everything in which they differ.
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "SmolLM3", "Granite", "Olmo2")
# Full names, because another package's class of the same name may compute anything.
_CLASSES = {
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}ForCausalLM": family
    for family in _FAMILIES
}
# Families whose layers all have the config's sliding window. Those of the others are in `layer_types`, if any.
_WINDOWED = ("Mistral", "Phi3")
# Rotary embeddings whose angles depend only on a token's position, as long as the text fits the context.
_ROPE_TYPES = {"", "default", "linear", "llama3", "yarn", "longrope"}


@dataclass(frozen=True)
class Architecture:
    """How a model differs from a plain Llama.

    Attributes:
        fused: whether queries, keys and values are one linear layer, and gates and ups another.
        norms_after: whether a block's results are normalised, rather than its input.
        wide_norms: whether norms of queries and keys, if there are any, span all heads.
        rotated: for each layer, how many numbers of a head are rotated: all, the first ones, or 0.
        embedding_factor, attention_factor, residual_factor, logits_factor: what embeddings, scores (besides
            1 / sqrt(head_dim)), results of blocks and logits are multiplied by.
    """

    fused: bool
    norms_after: bool
    wide_norms: bool
    rotated: tuple[int, ...]
    embedding_factor: float = 1.0
    attention_factor: float = 1.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0


def describe(model: PreTrainedModel) -> Architecture | str:
    """Return the model's architecture, or as a clause why our own forwards can't compute it.

    Trust the result only if the modules are those of the class (modified.py).
    """
    config, family = model.config, _CLASSES.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if family is None:
        return f"our kernels know {', '.join(_FAMILIES[:-1])} and {_FAMILIES[-1]}"
    layers = list(_find(model, "model.layers", ()))
    first = layers[0] if layers else None
    fused = _find(first, "self_attn.qkv_proj") is not None
    # Additional linear layers, e.g. an adapter's, would be ignored by our forwards.
    linears = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    if linears != (expected := (4 if fused else 7) * config.num_hidden_layers + 1):
        return f"it has {linears} linear layers instead of its config's {expected}, e.g. because of an adapter"
    if config.hidden_act != "silu":
        return f"our kernels don't know the activation {config.hidden_act}"
    if unknown := sorted(set(_rope_types(config)) - _ROPE_TYPES):
        return f"our kernels don't know rotary embeddings of type {unknown[0]}"
    if (window := _window(config, family)) < context_of(config):
        return f"our kernels know no sliding windows, and its window of {window} is smaller than its context"
    if family == "Granite" and not config.logits_scaling:
        return "its logits are divided by 0"
    dim = head_dim(config)
    rotated = 2 * len(_find(model, "model.rotary_emb.inv_freq", ()))
    scaling = _find(first, "self_attn.scaling", dim**-0.5)
    return Architecture(
        fused=fused,
        norms_after=_find(first, "post_feedforward_layernorm") is not None,
        wide_norms=len(_find(first, "self_attn.q_norm.weight", ())) > dim,
        rotated=tuple(rotated if _find(layer, "self_attn.use_rope", True) else 0 for layer in layers),
        embedding_factor=_find(model, "model.embedding_multiplier", 1.0),
        attention_factor=1.0 if scaling == dim**-0.5 else scaling * dim**0.5,
        residual_factor=_find(first, "residual_multiplier", 1.0),
        # Other families ignore a setting of this name.
        logits_factor=1 / config.logits_scaling if family == "Granite" else 1.0,
    )


def is_plain(architecture: Architecture, dim: int) -> bool:
    """Return whether a model with heads of `dim` numbers is a plain Llama, perhaps with norms of each head."""
    return architecture == Architecture(False, False, False, (dim,) * len(architecture.rotated))


def _find(module: Any, path: str, default: Any = None) -> Any:
    """Return the attribute at a path such as "self_attn.scaling", or the default if the user has removed it."""
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return default


def _window(config: Any, family: str) -> float:
    """Return the smallest sliding window of any layer, or infinity."""
    kinds = set(getattr(config, "layer_types", None) or ())
    slides = family in _WINDOWED or kinds & {"sliding_attention", "chunked_attention"}
    return (config.sliding_window if slides else None) or float("inf")


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
