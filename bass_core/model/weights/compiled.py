"""A model's weights as the CPU's own kernels read them.

Contract: `pack_llama` packs a 16-bit or quantised Llama or Qwen3 model. In each layer queries, keys and values are
joined, and gates and ups, 32 of each in turn (kernels/cpu/products.py). In any other model `compile_linears` puts
our products in the place of its 16-bit linear layers; a row's result does not depend on the number of rows.
Matrices are packed on all cores. This module imports numba: ask machine/cpu_kernels.py first.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cpu.kinds import STEP
from kernels.cpu.llama import PackedLlama
from kernels.cpu.packing import Packed, pack, pack_quantized
from kernels.cpu.products import linear
from kernels.reference.quantized import QuantizedWeight

from .modified import hooked_everywhere, is_hooked, is_patched
from .quantized import held
from .shape import HALVES, head_dim


class CompiledLinear(nn.Module):
    """y = x W^T + b of a 16-bit layer, from a copy of its weights; it can't be trained or pickled.

    shown: the layer itself, whose weight, bias and sizes a model's code may look into; None: nobody does.
    """

    def __init__(self, packed: Packed, shown: Any = None) -> None:
        super().__init__()
        if shown is not None:
            self.weight, self.bias = shown.weight, shown.bias
            self.in_features, self.out_features = shown.in_features, shown.out_features
        self.packed, self._multiply = packed, partial(linear, weight=packed)
        # Compiles the product, or loads its code from disk, before a clock runs.
        self._multiply(torch.zeros(1, packed.inputs))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype."""
        return self._multiply(x.float()).to(x.dtype)


def compiled(layer: nn.Linear) -> CompiledLinear:
    """A 16-bit layer as the kernels multiply it."""
    return CompiledLinear(_packed((layer,)))


def compile_linears(module: nn.Module) -> bool:
    """Put a CompiledLinear in the place of each 16-bit linear layer, but for an adapter's.

    Returns whether there was one.
    """
    # An adapter (PEFT's wrap a `base_layer`) reads its layers' weights.
    adapters = {part for one in module.modules() if hasattr(one, "base_layer") for part in one.modules()}
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if is_plain(child) and parent not in adapters
    ]
    for (parent, name, child), packed in zip(found, _pack_all([(child,) for _, _, child in found]), strict=True):
        setattr(parent, name, CompiledLinear(packed, child))
    return bool(found)


def is_plain(layer: Any) -> bool:
    """Whether calling a module is nothing but a product with a 16-bit weight."""
    if hooked_everywhere() or is_patched(nn.Linear):
        return False
    plain = type(layer) is nn.Linear and type(layer.weight.data) is Tensor and not is_hooked(layer)
    return plain and layer.weight.dtype in HALVES


def pack_llama(model: Any) -> PackedLlama:
    """The packed weights and the shape of a model that model/llama_cpu.py fits."""
    config, layers = model.config, model.model.layers
    groups: list[tuple[Any, ...]] = [group for layer in layers for group in _products(layer)]
    groups.append((model.get_output_embeddings(),))
    norms: list[Any] = [
        norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    head_norms: list[Any] = [
        getattr(layer.self_attn, name, None) for layer in layers for name in ("q_norm", "k_norm")
    ]
    return PackedLlama(
        _pack_all(groups),
        _stacked([norm.weight for norm in [*norms, model.model.norm]]),
        _stacked([] if None in head_norms else [norm.weight for norm in head_norms]).ravel(),
        config.rms_norm_eps,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim(config),
    )


def _pack_all(groups: list[tuple[Any, ...]]) -> list[Packed]:
    """Each group of layers that read the same input as one matrix."""
    largest_first = sorted(range(len(groups)), key=lambda i: -math.prod(held(groups[i][0]).shape))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = {index: pool.submit(_packed, groups[index]) for index in largest_first}
    return [tasks[index].result() for index in range(len(groups))]


def _products(layer: Any) -> list[tuple[nn.Module, ...]]:
    attn, mlp = layer.self_attn, layer.mlp
    return [
        (attn.q_proj, attn.k_proj, attn.v_proj),
        (attn.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    ]


def _packed(group: tuple[Any, ...]) -> Packed:
    join: Any = _in_turn if len(group) == 2 else torch.cat
    biases = [layer.bias for layer in group]
    bias = None if biases[0] is None else join([one.detach() for one in biases])
    weights: list[Any] = [held(layer) for layer in group]
    if isinstance(weights[0], QuantizedWeight):
        values, scales = (join([getattr(one, name) for one in weights]) for name in ("values", "scales"))
        return pack_quantized(QuantizedWeight(weights[0].kind, values, scales), bias)
    return pack(join([weight.detach() for weight in weights]), bias)


def _in_turn(parts: list[Tensor]) -> Tensor:
    """STEP rows of the first part, STEP of the second, and so on; each padded with zeros to whole steps."""
    rows = len(parts[0])
    padded = [
        F.pad(part, (0, 0) * (part.dim() - 1) + (0, -rows % STEP)).unflatten(0, (-1, STEP)) for part in parts
    ]
    return torch.stack(padded, dim=1).flatten(0, 2)


def _stacked(weights: list[Tensor]) -> Any:
    return (
        torch.stack([weight.detach().float() for weight in weights]).numpy() if weights else torch.zeros(0).numpy()
    )
