"""A model's weights in eight or four bits on a CPU.

Contract: `quantise_model` replaces, in place, every linear layer and the embedding by modules that hold quantised
weights (quantized_modules.py). "int8" has a scale a row throughout. "int4" has GGUF's Q4_1 blocks of 32 inputs,
and Q8_0 blocks in embedding and output layer. Left in their dtype are norms, biases, tables of positions and an
embedding with code of its own. A model that multiplies by anything but linear layers is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernels.reference.quantized import QUANTISERS, QuantizedWeight

from ...errors import PairError
from .quantized_modules import QuantizedEmbedding, QuantizedLinear

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
