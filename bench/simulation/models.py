"""The models of the predictions: what one forward of each reads and multiplies.

Contract: a shape is counted on a model built from its config on torch's meta device, so no weights exist; costs
are those of bass_core/models/weights/cost.py, with bfloat16 weights, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from transformers import LlamaConfig

from bass_core.models.weights.cost import ModelCost, model_cost

from ..gpu.shapes import build, draft_config, target_config

_BYTES = 2  # per bfloat16 number


@dataclass(frozen=True)
class Shape:
    """`cost` of a forward; `parameters` in memory, which include an embedding table that is only looked up."""

    name: str
    cost: ModelCost
    parameters: int
    layers: int
    hidden: int
    kv_heads: int

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * _BYTES


def shape_of(name: str, config: LlamaConfig) -> Shape:
    """The shape of a Llama config, counted on an empty model."""
    model = build(config, torch.device("meta"), torch.bfloat16, seed=0)
    heads, dim = config.num_key_value_heads, config.head_dim
    assert heads is not None and dim is not None
    kv = 2 * config.num_hidden_layers * heads * dim * _BYTES
    return Shape(
        name,
        model_cost(model, kv),
        sum(weight.numel() for weight in model.parameters()),
        config.num_hidden_layers,
        config.hidden_size,
        heads,
    )


@cache
def shapes(pair: str) -> tuple[Shape, Shape]:
    """Target and draft of a pair of PAIRS."""
    target, draft = PAIRS[pair]
    return shape_of(target[0], target[1]), shape_of(draft[0], draft[1])


def _llama(hidden: int, mlp: int, layers: int, heads: int, tied: bool = False) -> LlamaConfig:
    """A config with the vocabulary and the KV heads of Llama 3."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


# The paper gives its models' sizes but not their shapes; bench/gpu/shapes.py has our shapes of those sizes.
PAIRS = {
    "7.8B": (("7.8B", target_config(dry=False)), ("310M", draft_config(dry=False))),
    "70B": (
        ("70B (Llama 3's shape)", _llama(8192, 28672, 80, 64)),
        ("1B (Llama 3.2's shape)", _llama(2048, 8192, 16, 32, tied=True)),
    ),
}
