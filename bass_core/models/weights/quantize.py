"""In what a model's weights are held.

Contract: weights are quantised where a module holds them so on a CPU (quantized_modules.py), or where a linear
layer's weight is any other kind of tensor, as other packages leave it in a model that is handed in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .quantized_modules import QuantizedModule


def is_quantized(model: nn.Module) -> bool:
    """Whether the weight of a linear layer or an embedding is anything but a plain tensor."""
    return any(isinstance(module, QuantizedModule) or _is_foreign(module) for module in model.modules())


def _is_foreign(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight.data) is not torch.Tensor


def weight_dtype(model: Any) -> str:
    """How a transformers model's weights are held: "int4", "int8" or the name of its dtype, such as "bfloat16"."""
    kinds = {module.quantized.kind for module in model.modules() if isinstance(module, QuantizedModule)}
    if "q4_1" in kinds:
        return "int4"
    return "int8" if is_quantized(model) else str(model.dtype).removeprefix("torch.")
