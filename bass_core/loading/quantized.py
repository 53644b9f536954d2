"""Loaded models with weights of four or eight bits.

Contract: `check_quantised` refuses what a device can't do before anything is loaded; `quantise` does it, in place:
on a CPU in int8 or int4 (models/weights/cpu_quantize.py), elsewhere in int8 by torchao (quantize.py beside it).
Non-goals: which models are quantised, and when (loading/catalogue.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import RequestError
from ..models.weights.cpu_quantize import quantise_model
from ..models.weights.quantize import int8_weights, require_torchao
from .gguf_blocks import read_blocks

QUANTISED = ("int8", "int4")


def check_quantised(dtype: str | torch.dtype, device: torch.device) -> None:
    """Raises RequestError where the dtype is quantised and this device can't have it."""
    if dtype not in QUANTISED or device.type == "cpu":
        return
    if dtype == "int4":
        raise RequestError('dtype="int4" is for a CPU: choose int8 or bfloat16, or device="cpu".')
    require_torchao()


def quantise(model: Any, dtype: str, device: torch.device, gguf: Callable[[], Path] | None = None) -> None:
    """Quantise a model that will run on `device`; PairError if it can't be. `gguf` fetches its blocks for int4."""
    if device.type != "cpu":
        int8_weights(model)
        return
    blocks = None
    if dtype == "int4" and gguf is not None:
        config = model.config
        blocks = read_blocks(gguf(), config.num_attention_heads, config.num_key_value_heads)
    quantise_model(model, dtype, blocks)
