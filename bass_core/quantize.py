"""Contract: `int8_weights` turns a model's linear layers into 8-bit ones, through torchao's weight-only config.

A model that is quantised runs transformers' own forward; products are made in its old dtype. torchao is optional
(requirements-gpu.txt): without it int8 is refused in one sentence. Non-goals: 8-bit activations and caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import RequestError


def require_torchao() -> Any:
    """torchao.quantization; RequestError where it can't be imported or lacks the weight-only config."""
    try:
        from torchao import quantization

        return quantization.Int8WeightOnlyConfig, quantization.quantize_
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise RequestError(
            'dtype="int8" needs torchao: pip install -r requirements-gpu.txt, or choose bfloat16.'
        ) from error


def int8_weights(model: nn.Module) -> None:
    """Quantise in place: one scale for each output of each linear layer."""
    config, quantize = require_torchao()
    quantize(model, config())


def is_quantized(model: nn.Module) -> bool:
    """Whether a linear layer's weight is anything but a plain tensor."""
    return any(
        type(module.weight.data) is not torch.Tensor for module in model.modules() if isinstance(module, nn.Linear)
    )
