"""Read the quantised blocks of a GGUF file of a Llama-shaped model.

`read_blocks` returns the Q4_1 and Q8_0 tensors bit for bit, by the module names of transformers' LlamaForCausalLM;
other tensors are left out. GGUF stores dimensions i and i + D / 2 of a query or key head next to each other. We
restore transformers' order by moving whole rows of blocks. Other architectures, config and tokenizer are not read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.reference.quantized import BLOCK, QuantizedWeight, take_rows

from ...errors import WeightsError

# Bytes of scales at the start of each block.
_SCALE_BYTES = {"q8_0": 2, "q4_1": 4}
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_blocks(file: Path, heads: int, key_heads: int) -> dict[str, QuantizedWeight]:
    """Return the quantised weights by module name, given the numbers of query heads and key heads.

    Raises:
        WeightsError: if the file can't be read.
    """
    from gguf import GGUFReader

    try:
        tensors: list[Any] = GGUFReader(file).tensors
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise WeightsError(
            f"{file.name} can't be read as a GGUF file ({error}): remove it and start again."
        ) from error
    weights = {}
    for tensor in tensors:
        name, kind = _module(tensor.name), tensor.tensor_type.name.lower()
        if name is not None and kind in _SCALE_BYTES:
            weight = _weight(torch.tensor(tensor.data), kind)
            num_heads = {"q_proj": heads, "k_proj": key_heads}.get(name.rpartition(".")[2])
            weights[name] = weight if num_heads is None else take_rows(weight, _halves(weight.shape[0], num_heads))
    return weights


def _module(tensor: str) -> str | None:
    """Return the name of the module whose weight this tensor is, or None."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}" if part in _LAYER else None
    return _ENDS.get(tensor.removesuffix(".weight"))


def _weight(data: Tensor, kind: str) -> QuantizedWeight:
    """Split data uint8 [out, bytes per row] into scales and values; each block has its scales first."""
    size = _SCALE_BYTES[kind]
    blocks = data.unflatten(1, (-1, size + (BLOCK if kind == "q8_0" else BLOCK // 2)))
    scales, values = blocks[..., :size].contiguous().view(torch.float16), blocks[..., size:].contiguous()
    if kind == "q8_0":
        return QuantizedWeight(kind, values.view(torch.int8).flatten(1), scales.squeeze(2))
    return QuantizedWeight(kind, values, scales)


def _halves(rows: int, heads: int) -> Tensor:
    """Return int64 [rows], row numbers in the file: each head's even rows, then its odd rows."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
