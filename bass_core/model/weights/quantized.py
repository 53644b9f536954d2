"""Hold a model's weights in eight or four bits on a CPU.

`quantise_model` replaces linear layers and embeddings in place, and frees their 16-bit weights. The new modules
are correct but slow, because each product dequantises the whole weight (kernels/reference/quantized.py). Their
`weight` is dequantised on every access, so use `weight_of` unless you need the numbers. `is_quantized` also
recognises linear layers that another package has quantised. Training and save_pretrained are not supported.
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

# For each dtype name, how to quantise the linear layers, and how to quantise the embedding and the output layer.
KINDS = {"int8": ("int8", "int8"), "int4": ("q4_1", "q8_0")}


@dataclass(frozen=True)
class _Place:
    """A module with a weight, and its place in the model."""

    name: str
    parent: nn.Module
    child: str
    module: Any


def quantise_model(model: Any, name: str, ready: Mapping[str, QuantizedWeight] | None = None) -> None:
    """Quantise a transformers causal LM to `name`, "int8" or "int4", in place.

    `ready` has weights that exist already, by module name, for example from a GGUF file; all other weights are
    quantised here.

    Raises:
        PairError: if the model can't be quantised.
    """
    _refuse_other_products(model, name)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    inner, outer = KINDS[name]
    by_weight: dict[int, list[_Place]] = {}
    for place in _places(model, ends[0]):
        by_weight.setdefault(id(place.module.weight), []).append(place)
    while by_weight:  # pop, so that a 16-bit weight is freed before the next is quantised
        _, places = by_weight.popitem()
        weight = next((ready[place.name] for place in places if ready and place.name in ready), None)
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
        # A tensor that was loaded from a safetensors file keeps the whole file mapped, so copy it.
        parameter.data = parameter.data.clone()


def _refuse_other_products(model: nn.Module, name: str) -> None:
    for layer, module in model.named_modules():
        matrices = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        if matrices and not isinstance(module, (nn.Linear, nn.Embedding)):
            raise _refusal(model, name, f"{layer} is a {type(module).__name__}, not a linear layer", "bfloat16")


def _refusal(model: nn.Module, name: str, reason: str, instead: str) -> PairError:
    return PairError(f"{type(model).__name__} can't be held in {name}, because {reason}: choose {instead}.")


def _places(model: nn.Module, embedding: nn.Module) -> Iterator[_Place]:
    """Yield the linear layers and, if it is a plain table, the input embedding."""
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
    """Return whether the weight of any linear layer or embedding is not a plain tensor."""
    return any(isinstance(module, QuantizedModule) or _is_foreign(module) for module in model.modules())


def _is_foreign(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight.data) is not torch.Tensor


def weight_dtype(model: Any) -> str:
    """Return the form of a model's weights: "int4", "int8" or the name of its dtype, e.g. "bfloat16"."""
    kinds = {module.quantized.kind for module in model.modules() if isinstance(module, QuantizedModule)}
    if "q4_1" in kinds:
        return "int4"
    return "int8" if is_quantized(model) else str(model.dtype).removeprefix("torch.")


class QuantizedModule(nn.Module):
    """A module with a quantised weight [out, in]; it computes in `dtype` and returns `dtype`."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized, self.dtype = quantized, dtype

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in] in `dtype`, computed on every access."""
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
        """Map x [..., in] of any float dtype to [..., out] in that dtype."""
        return reference.linear(x, self.quantized, self.bias)


class QuantizedEmbedding(QuantizedModule):
    """An embedding with a quantised table, which may also be the output layer's."""

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(quantized, dtype)
        self.num_embeddings, self.embedding_dim = quantized.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 of any shape to embeddings [..., embedding_dim] in `dtype`."""
        return reference.embedding(ids, self.quantized).to(self.dtype)


def weight_of(module: Any) -> Tensor | QuantizedWeight:
    """Return a module's weight as stored: a QuantizedWeight, or the parameter itself.

    Both have a `shape`. Modules that share a weight return the same object.
    """
    quantized: QuantizedWeight | None = getattr(module, "quantized", None)
    weight: Tensor | QuantizedWeight = module.weight if quantized is None else quantized
    return weight


def weight_or_none(module: Any) -> Tensor | QuantizedWeight | None:
    """Return the module's weight as stored; None if it has none, for example because a user replaced the layer.

    The weight of torch's own quantised layers is packed, and `weight` is a method.
    """
    quantized = getattr(module, "quantized", None)
    weight = getattr(module, "weight", None) if quantized is None else quantized
    return weight if isinstance(weight, Tensor | QuantizedWeight) else None


def outputs_of(model: Any) -> int:
    """Return the number of logits per token of a transformers causal LM."""
    head = weight_or_none(model.get_output_embeddings())
    return int(model.config.get_text_config().vocab_size) if head is None else head.shape[0]


def look_up(ids: Tensor, table: Tensor | QuantizedWeight) -> Tensor:
    """Return rows [..., hidden] of a plain or quantised table [rows, hidden], in float32 if it is quantised."""
    return F.embedding(ids, table) if isinstance(table, Tensor) else reference.embedding(ids, table)
