"""Count the parameters, bytes and FLOPs of a forward from weights and config, without running the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.reference.quantized import QuantizedWeight

from .quantized import QuantizedModule, weight_of, weight_or_none
from .shape import config_value, head_dim


@dataclass(frozen=True)
class ModelCost:
    """The cost of one forward.

    Attributes:
        parameters: parameters that each token is multiplied with.
        weight_bytes: their size.
        kv_bytes: bytes of keys and values per cached token.
        attention_flops: FLOPs of attention per pair of a query token and a cached token.
    """

    parameters: int
    weight_bytes: int
    kv_bytes: int
    attention_flops: int


def model_cost(model: Any, kv_bytes: int) -> ModelCost:
    """Return the cost of a transformers causal LM, without an embedding table that is only looked up."""
    config = model.config.get_text_config()
    weights = {id(parameter): parameter for parameter in model.parameters()}
    weights |= {
        id(weight_of(module)): weight_of(module)
        for module in model.modules()
        if isinstance(module, QuantizedModule)
    }
    head, table = (weight_or_none(get()) for get in (model.get_output_embeddings, model.get_input_embeddings))
    if table is not None and head is not table:
        weights.pop(id(table), None)
    return ModelCost(
        parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        weight_bytes=sum(_nbytes(weight) for weight in weights.values()),
        kv_bytes=kv_bytes,
        attention_flops=4
        * config.num_hidden_layers
        * (config_value(config, "num_attention_heads") or 1)
        * head_dim(config),
    )


def _nbytes(weight: torch.Tensor | QuantizedWeight) -> int:
    """Return the bytes of a weight, counting one byte per element if another package quantised it."""
    plain = isinstance(weight, QuantizedWeight) or type(weight.data) is torch.Tensor
    return weight.nbytes if plain else math.prod(weight.shape)
