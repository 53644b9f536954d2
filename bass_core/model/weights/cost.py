"""What one forward of a model costs: parameters, bytes and FLOPs.

Contract: counted from the weights and the config; the model is not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.reference.quantized import QuantizedWeight

from .quantized import QuantizedModule, held, held_or_none
from .shape import head_dim, said


@dataclass(frozen=True)
class ModelCost:
    """What one forward costs: the `parameters` that a token is multiplied with, their bytes, bytes of keys and
    values per cached token, and FLOPs of attention per pair of a query token and a cached token."""

    parameters: int
    weight_bytes: int
    kv_bytes: int
    attention_flops: int


def model_cost(model: Any, kv_bytes: int) -> ModelCost:
    """The cost of a transformers causal LM; an embedding table that is only looked up is not counted."""
    config = model.config.get_text_config()
    weights = {id(parameter): parameter for parameter in model.parameters()}
    weights |= {
        id(held(module)): held(module) for module in model.modules() if isinstance(module, QuantizedModule)
    }
    head, table = (held_or_none(one()) for one in (model.get_output_embeddings, model.get_input_embeddings))
    if table is not None and head is not table:
        weights.pop(id(table), None)
    return ModelCost(
        parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        weight_bytes=sum(_nbytes(weight) for weight in weights.values()),
        kv_bytes=kv_bytes,
        attention_flops=4
        * config.num_hidden_layers
        * (said(config, "num_attention_heads") or 1)
        * head_dim(config),
    )


def _nbytes(weight: torch.Tensor | QuantizedWeight) -> int:
    """Bytes of a weight. One that another package quantised counts as one byte an element."""
    plain = isinstance(weight, QuantizedWeight) or type(weight.data) is torch.Tensor
    return weight.nbytes if plain else math.prod(weight.shape)
