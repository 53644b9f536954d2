"""Weights of eight or four bits on a CPU: making them, the modules that hold them, and finding out about them.

Contract: `quantise_model` works in place. Each of its modules stands in a transformers model for the nn.Linear or
nn.Embedding that it was made from, and computes the same with the weights that its `quantized` means, by
kernels/reference/quantized.py: correct and slow, since a product dequantises the whole weight. `weight` is that
matrix, made anew at each reading; use `held` for anything but its numbers. Nothing of the 16-bit weight is kept.
`is_quantized` is also true of a linear layer whose weight is any other kind of tensor, as other packages leave it
in a model that is handed in. Non-goals: training, save_pretrained, other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.reference import quantized as reference
from kernels.reference.quantized import QUANTISERS, QuantizedWeight

from ...errors import PairError

# For each name of a dtype: the kind of the layers, and that of embedding and output layer.
KINDS = {"int8": ("int8", "int8"), "int4": ("q4_1", "q8_0")}


@dataclass(frozen=True)
class _Place:
    """Where a module with a weight stands in the model."""

    name: str
    parent: nn.Module
    child: str
    module: Any


def quantise_model(model: Any, name: str, made: Mapping[str, QuantizedWeight] | None = None) -> None:
    """Quantise a transformers causal LM to "int8" or "int4", in place; PairError if that is not possible.

    made: weights that are there already, by the names of their modules in the model; the others are made here.
    """
    _refuse_other_products(model, name)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    inner, outer = KINDS[name]
    by_weight: dict[int, list[_Place]] = {}
    for place in _places(model, ends[0]):
        by_weight.setdefault(id(place.module.weight), []).append(place)
    while by_weight:  # popped, so that a 16-bit weight is freed before the next is quantised
        _, places = by_weight.popitem()
        weight = next((made[place.name] for place in places if made and place.name in made), None)
        if weight is None:
            kind = outer if any(place.module in ends for place in places) else inner
            try:
                weight = QUANTISERS[kind](places[0].module.weight)
            except ValueError as error:
                instead = "int8 or bfloat16" if name == "int4" else "bfloat16"
                raise _refusal(model, name, f"in {places[0].name} {error}", instead) from error
        for place in places:
            _replace(place, weight)
    for parameter in model.parameters():
        # A tensor of a safetensors file keeps the whole file mapped, and what was read of it in memory.
        parameter.data = parameter.data.clone()


def _refuse_other_products(model: nn.Module, name: str) -> None:
    for layer, module in model.named_modules():
        matrices = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        if matrices and not isinstance(module, (nn.Linear, nn.Embedding)):
            raise _refusal(model, name, f"{layer} is a {type(module).__name__} and no linear layer", "bfloat16")


def _refusal(model: nn.Module, name: str, reason: str, instead: str) -> PairError:
    return PairError(f"{type(model).__name__} can't be held in {name}, as {reason}: choose {instead}.")


def _places(model: nn.Module, embedding: nn.Module) -> Iterator[_Place]:
    """The linear layers and, if it is a plain table, the input embedding."""
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            if type(module) is nn.Linear or (type(module) is nn.Embedding and module is embedding):
                yield _Place(f"{name}.{child}" if name else child, parent, child, module)


def _replace(place: _Place, weight: QuantizedWeight) -> None:
    old = place.module
    if weight.shape != tuple(old.weight.shape):
        raise PairError(f"The quantised {place.name} is {weight.shape}, the model's is {tuple(old.weight.shape)}.")
    dtype = old.weight.dtype
    linear = isinstance(old, nn.Linear)
    new = QuantizedLinear(weight, old.bias, dtype) if linear else QuantizedEmbedding(weight, dtype)
    setattr(place.parent, place.child, new.eval())


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


class QuantizedModule(nn.Module):
    """A module with a weight [out, in] in quantised form; `dtype` is what it computes in and returns."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized, self.dtype = quantized, dtype

    @property
    def weight(self) -> Tensor:
        """[out, in] in `dtype`, dequantised at each reading."""
        return reference.dequantise(self.quantized).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.quantized.kind} {self.quantized.shape}"


class QuantizedLinear(QuantizedModule):
    """y = x W^T + b; `bias` is an nn.Parameter [out] or None."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(quantized, dtype)
        self.out_features, self.in_features = quantized.shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype."""
        return reference.linear(x, self.quantized, self.bias)


class QuantizedEmbedding(QuantizedModule):
    """The rows that ids name; the weight may be an output layer's too."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(quantized, dtype)
        self.num_embeddings, self.embedding_dim = quantized.shape

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 of any shape; returns [..., embedding_dim] in `dtype`."""
        return reference.embedding(ids, self.quantized).to(self.dtype)


def held(module: Any) -> Tensor | QuantizedWeight:
    """A linear layer's or embedding's weight as it is held: the QuantizedWeight, else the parameter itself.

    Both have a `shape`, and modules that share a weight hold the same object.
    """
    quantized: QuantizedWeight | None = getattr(module, "quantized", None)
    weight: Tensor | QuantizedWeight = module.weight if quantized is None else quantized
    return weight


def held_or_none(module: Any) -> Tensor | QuantizedWeight | None:
    """The same; None if the module has no weight itself, as one that a user put in the place of a layer."""
    try:
        return held(module)
    except AttributeError:
        return None


def outputs_of(model: Any) -> int:
    """How many logits a transformers causal LM has for a token."""
    head = held_or_none(model.get_output_embeddings())
    return int(model.config.get_text_config().vocab_size) if head is None else head.shape[0]


def look_up(ids: Tensor, table: Tensor | QuantizedWeight) -> Tensor:
    """Rows [..., hidden] of a table [rows, hidden] held in either way; of a quantised one in float32."""
    return F.embedding(ids, table) if isinstance(table, Tensor) else reference.embedding(ids, table)
