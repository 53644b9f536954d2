"""Pack a model's weights for our CPU kernels.

`pack_llama` packs a 16-bit or quantised Llama or Qwen3 model. It joins the queries, keys and values of each layer,
and interleaves gates and ups in blocks of 32 rows (kernels/cpu/products.py). For other models, `compile_linears`
replaces 16-bit linear layers by our products.

A row's result does not depend on the number of rows. This module imports numba: check `machine.cpu_kernels` before
you import it.
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
from .quantized import weight_of
from .shape import SIXTEEN_BIT, head_dim


class CompiledLinear(nn.Module):
    """y = x W^T + b of a 16-bit layer, from a packed copy of its weights; can't be trained or pickled."""

    def __init__(self, packed: Packed, shown: Any = None) -> None:
        """Wrap a packed weight.

        `shown` is the original layer, if the model's code may read its weight, bias or sizes.
        """
        super().__init__()
        if shown is not None:
            self.weight, self.bias = shown.weight, shown.bias
            self.in_features, self.out_features = shown.in_features, shown.out_features
        self.packed, self._multiply = packed, partial(linear, weight=packed)
        # Compile the product, or load its code from disk, before any clock runs.
        self._multiply(torch.zeros(1, packed.inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] of any float dtype to [..., out] in that dtype."""
        return self._multiply(x.float()).to(x.dtype)


def compiled(layer: nn.Linear) -> CompiledLinear:
    """Pack a 16-bit layer for our kernels."""
    return CompiledLinear(_pack_group((layer,)))


def compile_linears(module: nn.Module) -> bool:
    """Replace every 16-bit linear layer, except an adapter's, and return whether there was one."""
    # Leave out adapters, because they read their layers' weights. PEFT's adapters wrap a `base_layer`.
    adapters = {
        part for wrapper in module.modules() if hasattr(wrapper, "base_layer") for part in wrapper.modules()
    }
    linears = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if is_plain(child) and parent not in adapters
    ]
    for (parent, name, child), packed in zip(
        linears, _pack_all([(child,) for _, _, child in linears]), strict=True
    ):
        setattr(parent, name, CompiledLinear(packed, child))
    return bool(linears)


def is_plain(layer: Any) -> bool:
    """Return whether the module does nothing but multiply by a 16-bit weight."""
    if hooked_everywhere() or is_patched(nn.Linear):
        return False
    plain = type(layer) is nn.Linear and type(layer.weight.data) is Tensor and not is_hooked(layer)
    return plain and layer.weight.dtype in SIXTEEN_BIT


def pack_llama(model: Any) -> PackedLlama:
    """Pack the weights of a model that model/llama_cpu.py can run."""
    config, layers = model.config, model.model.layers
    groups: list[tuple[Any, ...]] = [group for layer in layers for group in _product_groups(layer)]
    groups.append((model.get_output_embeddings(),))
    norms: list[Any] = [
        norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    head_norms: list[Any] = [
        getattr(layer.self_attn, name, None) for layer in layers for name in ("q_norm", "k_norm")
    ]
    return PackedLlama(
        _pack_all(groups),
        _stack([norm.weight for norm in [*norms, model.model.norm]]),
        _stack([] if None in head_norms else [norm.weight for norm in head_norms]).ravel(),
        config.rms_norm_eps,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim(config),
    )


def _pack_all(groups: list[tuple[Any, ...]]) -> list[Packed]:
    """Pack each group of layers that read the same input as one matrix, on all cores."""
    largest_first = sorted(range(len(groups)), key=lambda i: -math.prod(weight_of(groups[i][0]).shape))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = {index: pool.submit(_pack_group, groups[index]) for index in largest_first}
    return [tasks[index].result() for index in range(len(groups))]


def _product_groups(layer: Any) -> list[tuple[nn.Module, ...]]:
    attn, mlp = layer.self_attn, layer.mlp
    return [
        (attn.q_proj, attn.k_proj, attn.v_proj),
        (attn.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    ]


def _pack_group(group: tuple[Any, ...]) -> Packed:
    join: Any = _interleave if len(group) == 2 else torch.cat
    biases = [layer.bias for layer in group]
    bias = None if biases[0] is None else join([part.detach() for part in biases])
    weights: list[Any] = [weight_of(layer) for layer in group]
    if isinstance(weights[0], QuantizedWeight):
        values, scales = (join([getattr(part, name) for part in weights]) for name in ("values", "scales"))
        return pack_quantized(QuantizedWeight(weights[0].kind, values, scales), bias)
    return pack(join([weight.detach() for weight in weights]), bias)


def _interleave(parts: list[Tensor]) -> Tensor:
    """Interleave STEP rows of each part in turn, after padding each part with zeros to whole steps."""
    rows = len(parts[0])
    padded = [
        F.pad(part, (0, 0) * (part.dim() - 1) + (0, -rows % STEP)).unflatten(0, (-1, STEP)) for part in parts
    ]
    return torch.stack(padded, dim=1).flatten(0, 2)


def _stack(weights: list[Tensor]) -> Any:
    return (
        torch.stack([weight.detach().float() for weight in weights]).numpy() if weights else torch.zeros(0).numpy()
    )
