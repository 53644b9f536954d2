"""Loaded models with weights of four or eight bits.

Contract: `check_quantised` refuses other devices than a CPU before anything is loaded; `quantise` quantises in
place, in int8 or int4 (model/weights/quantized.py).
Non-goals: which models are quantised, and when (model/loading/catalogue.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import RequestError
from ..weights.quantized import quantise_model
from .gguf_blocks import read_blocks

QUANTISED = ("int8", "int4")


def check_quantised(dtype: str | torch.dtype, device: torch.device) -> None:
    """Raises RequestError where the dtype is quantised and the device is no CPU."""
    if dtype in QUANTISED and device.type != "cpu":
        raise RequestError(f'dtype="{dtype}" is for a CPU: choose bfloat16, or device="cpu".')


def quantise(model: Any, dtype: str, gguf: Callable[[], Path] | None = None) -> None:
    """Quantise a model on a CPU; PairError if it can't be. `gguf` fetches its blocks for int4."""
    blocks = None
    if dtype == "int4" and gguf is not None:
        config = model.config
        blocks = read_blocks(gguf(), config.num_attention_heads, config.num_key_value_heads)
    quantise_model(model, dtype, blocks)
