"""8-bit weights on a GPU, through torchao's weight-only config; and in what a model's weights are held.

Contract: `int8_weights` quantises a model's linear layers. A quantised model runs transformers' own forward, and
its products are computed in its old dtype. That saves memory, not time: torchao converts the whole weight for each
product, which moves five bytes per weight where bfloat16 moves two, so int8 is slower than bfloat16 on a GPU
(read in torchao 0.18, not measured). models/llama_int8.py reads only the bytes; it has not been measured
on a GPU either. torchao is optional (requirements-gpu.txt): without it int8 is refused there in one sentence.
Non-goals: weights on a CPU (cpu_quantize.py); 8-bit activations and caches.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ...errors import RequestError
from .quantized_modules import QuantizedModule


def require_torchao() -> Any:
    """torchao's Int8WeightOnlyConfig and quantize_; RequestError if they can't be imported."""
    try:
        from torchao import quantization

        return quantization.Int8WeightOnlyConfig, quantization.quantize_
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise RequestError(
            'dtype="int8" needs torchao on a GPU: pip install -r requirements-gpu.txt, or choose bfloat16.'
        ) from error


def int8_weights(model: nn.Module) -> None:
    """Quantise in place: one scale for each output of each linear layer."""
    config, quantize = require_torchao()
    # Version 1 of the weights: the only one before torchao 0.15, then deprecated, removed in 0.18.
    versioned = "version" in inspect.signature(config).parameters
    quantize(model, config(version=2) if versioned else config())


def is_quantized(model: nn.Module) -> bool:
    """Whether the weight of a linear layer or an embedding is anything but a plain tensor."""
    return any(isinstance(module, QuantizedModule) or _of_torchao(module) for module in model.modules())


def _of_torchao(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight.data) is not torch.Tensor


def weight_dtype(model: Any) -> str:
    """How a transformers model's weights are held: "int4", "int8" or the name of its dtype, such as "bfloat16"."""
    kinds = {module.quantized.kind for module in model.modules() if isinstance(module, QuantizedModule)}
    if "q4_1" in kinds:
        return "int4"
    return "int8" if is_quantized(model) else str(model.dtype).removeprefix("torch.")
