"""Read the weights of a GGUF file of a Llama-shaped model, by the module names of transformers' LlamaForCausalLM.

`read_weights` returns all of them dequantised. `read_blocks` returns the Q4_1 and Q8_0 tensors bit for bit, and
leaves out other tensors. GGUF stores dimensions i and i + D / 2 of a query or key head next to each other; we
restore transformers' order by moving whole rows. Other architectures are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels.reference.quantized import BLOCK, QuantizedWeight, take_rows

from .gguf_file import GgufTensor, read_gguf

# Bytes of scales at the start of each block.
_SCALE_BYTES = {"q8_0": 2, "q4_1": 4}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def read_weights(file: Path, heads: int, key_heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights in `dtype` by module name, given the numbers of query heads and key heads.

    Raises:
        WeightsError: if the file can't be read.
    """
    weights = {}
    for name, tensor, rows in _tensors(file, heads, key_heads):
        weight = torch.from_numpy(tensor.dequantised()).to(dtype)
        weights[name] = weight if rows is None else weight[rows]
    return weights


def read_blocks(file: Path, heads: int, key_heads: int) -> dict[str, QuantizedWeight]:
    """Return the quantised weights by module name, given the numbers of query heads and key heads.

    Raises:
        WeightsError: if the file can't be read.
    """
    weights = {}
    for name, tensor, rows in _tensors(file, heads, key_heads):
        kind = tensor.kind.name.lower()
        if kind in _SCALE_BYTES:
            weight = _weight(torch.tensor(tensor.data), kind)
            weights[name] = weight if rows is None else take_rows(weight, rows)
    return weights


def _tensors(file: Path, heads: int, key_heads: int) -> Iterator[tuple[str, GgufTensor, Tensor | None]]:
    """Yield each weight's module, its tensor, and the order of its rows, or None if they stay where they are."""
    for title, tensor in read_gguf(file)[1].items():
        name = _module(title)
        if name is not None:
            num_heads = {"q_proj": heads, "k_proj": key_heads}.get(name.rpartition(".")[2])
            yield name, tensor, None if num_heads is None else _halves(tensor.data.shape[0], num_heads)


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
