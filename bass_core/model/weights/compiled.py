"""Pack a model's weights for our CPU kernels.

`pack_llama` packs a 16-bit or quantised model that `describe` knows (shape.py). It joins the queries, keys and
values of each layer, and interleaves gates and ups in blocks of 32 rows (kernels/cpu/products.py). For other
models, `compile_linears` replaces 16-bit linear layers by our products.

A row's result does not depend on the number of rows. This module imports numba: check `machine.cpu_kernels` before
you import it.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
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
from .shape import SIXTEEN_BIT, Architecture, head_dim


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
    return CompiledLinear(_pack_product(_Product((layer,))))


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
        linears, _pack_all([_Product((child,)) for _, _, child in linears]), strict=True
    ):
        setattr(parent, name, CompiledLinear(packed, child))
    return bool(linears)


def is_plain(layer: Any) -> bool:
    """Return whether the module does nothing but multiply by a 16-bit weight."""
    if hooked_everywhere() or is_patched(nn.Linear):
        return False
    plain = type(layer) is nn.Linear and type(layer.weight.data) is Tensor and not is_hooked(layer)
    return plain and layer.weight.dtype in SIXTEEN_BIT


class _Product(NamedTuple):
    """Linear layers that read the same input, as one matrix; `gated` for gates and ups; `factor` scales it."""

    layers: tuple[Any, ...]
    gated: bool = False
    factor: float = 1.0


def pack_llama(model: Any, architecture: Architecture) -> PackedLlama:
    """Pack the weights of a model that model/llama_cpu.py can run."""
    config, layers = model.config, model.model.layers
    products = [product for layer in layers for product in _layer_products(layer, architecture)]
    products.append(_Product((model.get_output_embeddings(),), factor=architecture.logits_factor))
    norms, norm_rows = _norms(model, architecture)
    head_norms = [
        torch.cat([norm.weight for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)])
        for layer in layers
        if hasattr(layer.self_attn, "q_norm")
    ]
    return PackedLlama(
        matrices=_pack_all(products),
        norms=norms,
        norm_rows=norm_rows,
        head_norms=_stack(head_norms) if head_norms else np.empty((len(layers), 0), np.float32),
        rotated=np.array(architecture.rotated, np.int64),
        factor=architecture.attention_factor,
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=head_dim(config),
    )


def _norms(model: Any, architecture: Architecture) -> tuple[Any, Any]:
    """Return all norms, float32 [2 layers + 1, hidden], and their uses, int64 [2 layers + 1, 2] (`norm_rows`)."""
    names = ("input_layernorm", "post_attention_layernorm")
    if architecture.norms_after:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    norms = [getattr(layer, name) for layer in model.model.layers for name in names]
    blocks, rows = len(norms), np.full((len(norms) + 1, 2), -1, np.int64)
    if architecture.norms_after:
        rows[1:, 0] = np.arange(blocks)
    else:
        rows[:-1, 1] = np.arange(blocks)
    rows[-1, 1] = blocks
    return _stack([norm.weight for norm in [*norms, model.model.norm]]), rows


def _pack_all(products: list[_Product]) -> list[Packed]:
    """Pack each product's layers as one matrix, on all cores."""
    sizes = [math.prod(weight_of(product.layers[0]).shape) for product in products]
    largest_first = sorted(range(len(products)), key=lambda index: -sizes[index])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = {index: pool.submit(_pack_product, products[index]) for index in largest_first}
    return [tasks[index].result() for index in range(len(products))]


def _layer_products(layer: Any, architecture: Architecture) -> list[_Product]:
    attn, mlp, factor = layer.self_attn, layer.mlp, architecture.residual_factor
    inputs = (attn.qkv_proj,) if architecture.fused else (attn.q_proj, attn.k_proj, attn.v_proj)
    gates = (mlp.gate_up_proj,) if architecture.fused else (mlp.gate_proj, mlp.up_proj)
    return [
        _Product(inputs),
        _Product((attn.o_proj,), factor=factor),
        _Product(gates, gated=True),
        _Product((mlp.down_proj,), factor=factor),
    ]


def _pack_product(product: _Product) -> Packed:
    layers = product.layers
    biases: list[Any] = [layer.bias for layer in layers]
    bias = None if biases[0] is None else _joined([part.detach() for part in biases], product.gated)
    weights: list[Any] = [weight_of(layer) for layer in layers]
    if isinstance(weights[0], QuantizedWeight):
        values, scales = (
            _joined([getattr(part, name) for part in weights], product.gated) for name in ("values", "scales")
        )
        packed = pack_quantized(QuantizedWeight(weights[0].kind, values, scales), bias)
    else:
        packed = pack(_joined([weight.detach() for weight in weights], product.gated), bias)
    return packed if product.factor == 1 else packed.times(product.factor)


def _joined(parts: list[Tensor], gated: bool) -> Tensor:
    """Join the rows of layers; interleave those of gates and ups."""
    if not gated:
        return torch.cat(parts)
    return _interleave(list(parts[0].chunk(2)) if len(parts) == 1 else parts)


def _interleave(parts: list[Tensor]) -> Tensor:
    """Interleave STEP rows of each part in turn, after padding each part with zeros to whole steps."""
    rows = len(parts[0])
    padded = [
        F.pad(part, (0, 0) * (part.dim() - 1) + (0, -rows % STEP)).unflatten(0, (-1, STEP)) for part in parts
    ]
    return torch.stack(padded, dim=1).flatten(0, 2)


def _stack(weights: list[Tensor]) -> Any:
    return torch.stack([weight.detach().float() for weight in weights]).numpy()
