"""Every matrix product of one step of a compiled target on a CPU, and the same shapes by the libraries.

Contract: an arm takes a number of tokens and makes a function that multiplies that many vectors by all the weights
of a step in turn, and throws the results away. Arms share no weights; ours is compiled_products.py. Non-goals:
timing (cpu/floor.py), and what lies between the products of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bass_core import ModelPair
from bass_core.model.llama_cpu import LlamaCompiled

Arm = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Product:
    """x [N, inputs] to [N, outputs]; nbytes: of its weights."""

    outputs: int
    inputs: int
    nbytes: int


def products_of(pair: ModelPair) -> list[Product]:
    """The products of one step of the pair's target, in the order of the step. Raises ValueError if unknown."""
    model = pair.target_step
    if not isinstance(model, LlamaCompiled):
        raise ValueError(
            f"the products of {model.name} are not known: choose a Llama or a Qwen3 of 16 bits or fewer"
        )
    return [Product(one.rows, one.inputs, one.nbytes) for one in model.packed.matrices]


def libraries(products: list[Product]) -> dict[str, Arm]:
    """Arms with products of 16-bit weights by the libraries that torch has for this CPU; weights are random."""
    makers = {
        "FBGEMM float16": (_fbgemm, torch.float32),
        "oneDNN bfloat16": (_onednn, torch.bfloat16),
    }
    made: dict[str, Arm] = {}
    for name, (pack, dtype) in makers.items():
        try:
            packed = [(pack(0.02 * torch.randn(one.outputs, one.inputs)), one.inputs) for one in products]
            _arm(packed[:1], dtype)(1)()
        except (AttributeError, RuntimeError):  # not on this CPU, or not in this torch
            continue
        made[name] = _arm(packed, dtype)
    return made


def _fbgemm(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """float16 weights, float32 inputs and sums."""
    packed, multiply = (
        torch.ops.quantized.linear_prepack_fp16(weight),
        torch.ops.quantized.linear_dynamic_fp16.default,
    )
    return lambda x: multiply(x, packed)


def _onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """bfloat16 weights, inputs and outputs."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, None, "none", [], "")


def _arm(products: list[tuple[Callable[[Tensor], Tensor], int]], dtype: torch.dtype) -> Arm:
    def of(tokens: int) -> Callable[[], object]:
        given = {size: torch.randn(tokens, size).to(dtype) for _, size in products}

        def run() -> None:
            for product, size in products:
                product(given[size])

        return run

    return of
