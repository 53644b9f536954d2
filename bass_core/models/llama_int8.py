"""The forward of models/llama_cuda.py over 8-bit weights, which kernels/triton/linear_int8.py reads as bytes.

Contract: off by default, because it has not been measured on a GPU yet; BASS_INT8_KERNELS=1 turns it on for
Llama-shaped models that torchao has quantised (models/weights/quantize.py; version 2 of its weights). Joined
weights are kept once, as in models/llama_cuda.py. Steps of more rows than the kernel takes convert the whole
weight, as torchao does. Equal to the model's own forward within rounding. Non-goals: groups of weights with a
scale each, other quantisers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.reference import linear as linear_reference
from kernels.support import is_accelerator

from .llama_cuda import LlamaCuda, fits_shape


@dataclass(frozen=True)
class Int8Weight:
    """values int8 [N, K], and a float32 scale [N] for each row."""

    values: Tensor
    scale: Tensor


def enabled() -> bool:
    """Whether BASS_INT8_KERNELS=1 is set."""
    return os.environ.get("BASS_INT8_KERNELS") == "1"


def fits(model: PreTrainedModel) -> bool:
    """Whether models/llama_cuda.py computes the model and every linear layer has one scale per row."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return fits_shape(model) and all(_scaled_by_rows(layer.weight) for layer in linears)


def _scaled_by_rows(weight: Any) -> bool:
    values = getattr(weight, "qdata", None)
    return isinstance(values, Tensor) and values.dtype == torch.int8 and weight.scale.numel() == len(values)


class LlamaInt8(LlamaCuda):
    """A quantised Llama or Qwen3 model on an accelerator."""

    @staticmethod
    def join(*modules: Any) -> Int8Weight:
        """The modules' bytes, one below the other; on an accelerator the modules' own become views of them."""
        parts = [module.weight.qdata for module in modules]
        values = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if is_accelerator(values.device):
            for module, part in zip(modules, values.split([len(part) for part in parts]), strict=True):
                module.weight.qdata = part
        return Int8Weight(values, torch.cat([module.weight.scale.flatten() for module in modules]).float())

    def product(
        self,
        x: Tensor,
        weight: Any,
        norm: Tensor | None = None,
        gate: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As LlamaCuda's, for an Int8Weight."""
        options: Any = {"norm": norm, "eps": self.eps, "gate": gate, "residual": residual}
        if self.has_kernels and self.plan.takes(x.numel() // x.shape[-1], x.itemsize):
            from kernels.triton import linear_int8  # imports triton

            return linear_int8.linear(x, weight.values, weight.scale, **options)
        return linear_reference.linear_int8(x, weight.values, weight.scale, **options)
