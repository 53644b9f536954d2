"""What one forward of a model costs: parameters, bytes and FLOPs.

Contract: counted from the weights and the config; the model is not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        weights.pop(id(embedding.weight), None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelCost(
        parameters=sum(parameter.numel() for parameter in weights.values()),
        weight_bytes=sum(_nbytes(parameter) for parameter in weights.values()),
        kv_bytes=kv_bytes,
        attention_flops=4 * config.num_hidden_layers * config.num_attention_heads * dim,
    )


def _nbytes(weight: torch.Tensor) -> int:
    """Bytes of a weight. A quantised weight has one byte per element, whatever dtype it reports."""
    return weight.nbytes if type(weight.data) is torch.Tensor else weight.numel()
