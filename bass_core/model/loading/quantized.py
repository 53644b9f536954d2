"""Quantise loaded models to int8 or int4 on a CPU.

`check_quantised` refuses other devices before anything is loaded. `quantise` works in place
(model/weights/quantized.py). catalogue.py decides which models are quantised, and when.
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
    """Raise RequestError if the dtype is quantised and the device is not a CPU."""
    if dtype in QUANTISED and device.type != "cpu":
        raise RequestError(f'dtype="{dtype}" is for a CPU: choose bfloat16, or device="cpu".')


def quantise(model: Any, dtype: str, gguf: Callable[[], Path] | None = None) -> None:
    """Quantise a model on a CPU in place, to "int8" or "int4".

    `gguf` fetches the GGUF file whose blocks int4 keeps, if there is one.

    Raises:
        PairError: if the model can't be quantised.
    """
    blocks = None
    if dtype == "int4" and gguf is not None:
        config = model.config
        blocks = read_blocks(gguf(), config.num_attention_heads, config.num_key_value_heads)
    quantise_model(model, dtype, blocks)
