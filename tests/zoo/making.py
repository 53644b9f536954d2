"""Tiny random models of every causal architecture in transformers: call `make`.

They have three layers and 96 words, are float32, and are the same for each call. A window is 8 tokens and a chunk
16, so that short texts cover both. The layers cycle through all layer types of the architecture.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WORDS = 96
LAYERS = 3
# Models with more parameters than this are not tried.
MAX_PARAMETERS = 8_000_000
_HEADS = {"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4}
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("mlp_hidden_size", "n_inner"), 64),
    **dict.fromkeys(_DEPTHS, LAYERS),
    **_HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    "sliding_window": 8,
    "attention_chunk_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_experts_shared", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "rotary_dim": 8,
    **dict.fromkeys(("initializer_range", "init_std"), 0.4),
    "is_decoder": True,
    "tie_word_embeddings": False,
    "vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), None),
}
# Sizes of latent attention: keys have 8 dimensions without positions and 4 with them, values have 6.
_LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
# Settings that only one architecture needs.
SPECIAL: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {"v_head_dim": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    # This model runs its layers repeatedly. With larger weights, rounding would change its text.
    "hrm_text": {"initializer_range": 0.15},
    "emu3": {"pad_token_id": 0},
    "modernbert-decoder": {"pad_token_id": 0},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "zamba2": {"n_mamba_heads": 4, "mamba_d_state": 16, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


class NotTried(Exception):
    """No tiny model of an architecture can be made, or transformers itself can't run it."""


def kinds() -> list[str]:
    """Return the sorted architectures, as the names of their configs."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make(kind: str) -> Any:
    """Return a tiny model of this architecture; raise NotTried, with the reason, if that is not possible."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config_class: Any = CONFIG_MAPPING[kind]
    failure = "no attempt"
    for config in _configs(config_class, kind):
        try:
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
            if size > MAX_PARAMETERS:
                failure = f"{size} parameters"
                continue
            torch.manual_seed(0)
            model = model_class(config).eval()
            model(input_ids=torch.ones(1, 3, dtype=torch.long))
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        model.generation_config.eos_token_id = None
        return model
    raise NotTried(f"{kind}: {failure}")


def _configs(config_class: Any, kind: str) -> Iterator[Any]:
    """Yield configs with the tiny sizes: first with all of them, then without a few that may conflict."""
    try:
        whole = config_class()
        text_class = type(whole.get_text_config(decoder=True))
        default = text_class()
    except Exception as error:
        raise NotTried(f"{kind}: {type(error).__name__}: {error}") from error
    sizes = {name: value for name, value in _SIZES.items() if _takes(default, name)}
    if _takes(default, "qk_rope_head_dim"):
        sizes |= {name: value for name, value in _LATENT.items() if _takes(default, name)}
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if types:
        sizes["layer_types"] = [types[i % len(types)] for i in range(LAYERS)]
    sizes |= SPECIAL.get(kind, {})
    doubtful = ["head_dim", "layer_types", "num_key_value_heads", "sliding_window", "pad_token_id", "bos_token_id"]
    doubtful += ["eos_token_id", "decoder_start_token_id", *(name for name in sizes if name not in doubtful)]
    ids = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
    without: list[set[str]] = [set(), ids]
    without += [
        set(pair) | extra for extra in (set(), ids) for many in (1, 2) for pair in combinations(doubtful[:4], many)
    ]
    without += [{name} for name in doubtful[4:]]
    for left_out in without:
        try:
            yield text_class(**{name: value for name, value in sizes.items() if name not in left_out})
        except Exception:
            continue


def _takes(config: Any, name: str) -> bool:
    """Return whether the config has an attribute of that name that can be set."""
    try:
        exists = hasattr(config, name)
    except RuntimeError:
        exists = True
    attribute = getattr(type(config), name, None)
    return exists and not (isinstance(attribute, property) and attribute.fset is None)
