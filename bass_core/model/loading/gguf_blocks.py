"""A GGUF file's quantised blocks, for a Llama-shaped model of transformers.

Contract: `read_blocks` returns the file's Q4_1 and Q8_0 tensors as they are, bit for bit, by the names of the
modules in transformers' LlamaForCausalLM. GGUF files hold the rows of queries and keys with dimensions i and
i + D / 2 of a head side by side; they are put back in transformers' order, whole rows of blocks at a time.
Non-goals: other architectures, tensors of other types, which are left out, and reading config or tokenizer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.reference.quantized import BLOCK, QuantizedWeight, take_rows

from ...errors import WeightsError

# Bytes of scales before the values of each block.
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
    """The quantised weights by module name, given the heads of queries and of keys; WeightsError if unreadable."""
    from gguf import GGUFReader

    try:
        tensors: list[Any] = GGUFReader(file).tensors
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise WeightsError(
            f"{file.name} is no readable GGUF file ({error}): remove it and start again."
        ) from error
    weights = {}
    for tensor in tensors:
        name, kind = _module(tensor.name), tensor.tensor_type.name.lower()
        if name is not None and kind in _SCALE_BYTES:
            weight = _weight(torch.tensor(tensor.data), kind)
            turned = {"q_proj": heads, "k_proj": key_heads}.get(name.rpartition(".")[2])
            weights[name] = weight if turned is None else take_rows(weight, _halves(weight.shape[0], turned))
    return weights


def _module(tensor: str) -> str | None:
    """The name of the module that a tensor of the file is the weight of."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}" if part in _LAYER else None
    return _ENDS.get(tensor.removesuffix(".weight"))


def _weight(data: Tensor, kind: str) -> QuantizedWeight:
    """data uint8 [out, bytes of a row]: for each block its scales, then its values."""
    size = _SCALE_BYTES[kind]
    blocks = data.unflatten(1, (-1, size + (BLOCK if kind == "q8_0" else BLOCK // 2)))
    scales, values = blocks[..., :size].contiguous().view(torch.float16), blocks[..., size:].contiguous()
    if kind == "q8_0":
        return QuantizedWeight(kind, values.view(torch.int8).flatten(1), scales.squeeze(2))
    return QuantizedWeight(kind, values, scales)


def _halves(rows: int, heads: int) -> Tensor:
    """int64 [rows]: the file's rows, ordered so that in each head the first of all pairs precede the second."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
