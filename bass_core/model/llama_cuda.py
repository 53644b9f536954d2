"""A short forward for Llama-shaped models on a GPU: five kernels per layer, four products and attention.

It replaces CausalModel's `forward`, with equal results within rounding. The weights of queries, keys and values
are joined, and so are those of gate and up. On an accelerator they are stored once: the model's own parameters
become views of the joined ones. `LlamaCuda.plan` chooses the products that run on kernels/triton/linear.py; torch
computes the others, with our norms and gate around them (kernels/triton/pointwise.py): then a layer takes eight
kernels. Attention rotates and writes keys, except in long prompts and with torch's or flash-attn's backends.

Nothing here reads lengths on the host, so every step can be captured in a CUDA graph (graphs.py). It also runs on
a CPU for tests, slowly, in torch or in Triton's interpreter. Rotary embeddings that depend on the text's length,
and attention biases, are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.backends import BACKENDS, fused, rotates_inside
from kernels.plan import AttentionPlan, Rotation
from kernels.reference import cache as cache_reference
from kernels.reference import linear as linear_reference
from kernels.shapes import LARGEST_WEIGHT
from kernels.support import available, has_tensor_cores, is_accelerator

from ..machine.memory import available_bytes
from ..machine.transfer import to_device
from .base import CausalModel, shadow_of
from .cache import RaggedCache
from .forward import CapturedBatch, ForwardBatch, ForwardOutput
from .weights.quantized import is_quantized
from .weights.shape import describe, head_dim, is_plain, rope_depends_on_length


@dataclass(frozen=True)
class ProductPlan:
    """Which products run on our kernel rather than torch's.

    Attributes:
        most_rows: our kernel computes products of at most this many rows (batch x query tokens).
        gemv: whether it also computes products of a single row.
        most_bytes: with several rows, it computes products with weights of at most this many bytes. Small products
            gain from doing norm, gate and residual in one launch. Torch is faster with large ones (`python -m
            bench gpu`, "ours at any size").
    """

    most_rows: int = 64
    gemv: bool = True
    most_bytes: int = LARGEST_WEIGHT

    def takes(self, rows: int, itemsize: int, weight_bytes: int) -> bool:
        """Return whether our kernel computes a product of `rows` rows with weights of `itemsize`-byte numbers."""
        limit = min(self.most_rows, 64 if itemsize == 2 else 16)
        return rows <= limit and (self.gemv if rows == 1 else weight_bytes <= self.most_bytes)


@dataclass
class _Layer:
    """One layer's weights, joined if they multiply the same input."""

    input_norm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def fits(model: PreTrainedModel) -> bool:
    """Return whether this forward can compute the model: a plain Llama, with plain weights and no biases."""
    architecture = describe(model)
    if is_quantized(model) or isinstance(architecture, str) or not is_plain(architecture, head_dim(model.config)):
        return False
    biases = any(module.bias is not None for module in model.modules() if isinstance(module, nn.Linear))
    return not biases and not rope_depends_on_length(model.config)


def has_room(model: PreTrainedModel) -> bool:
    """Return whether the device has room to copy one layer's joined weights (1.25 times their size is free)."""
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    needed = sum(p.nbytes for name, p in model.named_parameters() if name.split(".")[-2] in names)
    return bool(1.25 * needed / model.config.num_hidden_layers < available_bytes(model.device))


class LlamaCuda(CausalModel):
    """A Llama or Qwen3 model whose weights are joined once; `plan` may be replaced between captures."""

    never_waits = True

    def _prepare(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self.copies_weights = not is_accelerator(self.device)
        # If Triton can't use the tensor cores, torch's products are several times faster, because torch can.
        self.plan = ProductPlan() if has_tensor_cores(self.device) else ProductPlan(most_rows=0)
        self.has_kernels = available(self.device)
        self.cache_dtype = model.dtype
        self.heads: int = config.num_attention_heads
        self.eps = float(config.rms_norm_eps)
        self.embedding = _weight(model.get_input_embeddings())
        self.head = _join(model.get_output_embeddings())
        self.final_norm = _weight(body.norm)
        self.blocks = [_block(layer) for layer in body.layers]
        rotary: Any = shadow_of(body.rotary_emb)
        positions = torch.arange(self.context, device=self.device)[None]
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=self.device), positions)
        half = self.head_dim // 2
        self.cos, self.sin = (turn[0, :, :half].float().contiguous() for turn in (cos, sin))

    def _compute(
        self, batch: ForwardBatch | CapturedBatch, plan: AttentionPlan, cache: RaggedCache, backend: str
    ) -> ForwardOutput:
        x = batch.tokens
        x = x.to(self.embedding.dtype) if x.is_floating_point() else F.embedding(x, self.embedding)
        streams = []
        for index, layer in enumerate(self.blocks):
            if batch.return_states and index in self.readout.layers:
                streams.append(x)
            x = self._block(x.contiguous(), index, layer, cache, plan, backend)
        states = None
        if batch.return_states:
            states = self.readout(streams, F.rms_norm(x, (self.hidden,), self.final_norm, self.eps))
        if batch.wanted_columns is not None:
            rows = torch.arange(len(batch.wanted_columns), device=x.device)
            x = x[rows, to_device(batch.wanted_columns, x.device)]
        return ForwardOutput(self.product(x, self.head, norm=self.final_norm), states)

    def _block(
        self, x: Tensor, index: int, layer: _Layer, cache: RaggedCache, plan: AttentionPlan, backend: str
    ) -> Tensor:
        qkv = self.product(x, layer.qkv, norm=layer.input_norm)
        return self._attend(x, qkv, index, layer, cache, plan, backend)

    def _attend(
        self,
        x: Tensor,
        qkv: Tensor,
        index: int,
        layer: _Layer,
        cache: RaggedCache,
        plan: AttentionPlan,
        backend: str,
    ) -> Tensor:
        """Run the rest of a layer, given its joined queries, keys and values, on the stream x [B, S, hidden]."""
        batch, queries, _ = x.shape
        qkv = qkv.view(batch, queries, -1, self.head_dim)
        query = qkv[:, :, : self.heads].transpose(1, 2)
        keys, values = plan.reads(index)
        rotation = Rotation(qkv, cache.buffer[index], self.cos, self.sin, layer.head_norms, self.eps)
        attend = BACKENDS[backend]
        if self.has_kernels and rotates_inside(backend, query, keys, plan):
            attend = partial(fused, rotation=rotation)
        else:
            self._rotate_write(rotation, plan)
        prefix = None if plan.shared is None else plan.shared.reads(index)
        out = attend(query, keys, values, plan, scaling=self.head_dim**-0.5, prefix=prefix)
        attended = out.reshape(batch, queries, -1)
        if self.has_kernels and not self._multiplies(x, layer.output, layer.gate_up):
            from kernels.triton.pointwise import add_norm  # imports triton

            x, normed = add_norm(F.linear(attended, layer.output), layer.mlp_norm, self.eps, residual=x)
            wide = self.product(normed, layer.gate_up, gate=True)
        else:
            x = self.product(attended, layer.output, residual=x)
            wide = self.product(x, layer.gate_up, norm=layer.mlp_norm, gate=True)
        return self.product(wide, layer.down, residual=x, overwrite=True)

    def _multiplies(self, x: Tensor, *weights: Tensor) -> bool:
        """Return whether our kernel computes the product of x with one of the weights."""
        rows = x.numel() // x.shape[-1]
        return any(self.plan.takes(rows, x.itemsize, weight.nbytes) for weight in weights)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        norm: Tensor | None = None,
        gate: bool = False,
        residual: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """Run `linear` of kernels/triton/linear.py, on our kernel or in torch, as `plan` decides.

        `overwrite` allows the result to replace the residual.
        """
        options: Any = {"norm": norm, "eps": self.eps, "gate": gate, "residual": residual}
        if not self.has_kernels:
            return linear_reference.linear(x, weight, **options)
        from kernels.triton import linear, pointwise  # import triton

        if self._multiplies(x, weight):
            return linear.linear(x, weight, **options)
        return pointwise.linear(x.contiguous(), weight, **options, overwrite=overwrite)

    def _rotate_write(self, rotation: Rotation, plan: AttentionPlan) -> None:
        rotate_write = cache_reference.rotate_write
        if self.has_kernels:
            from kernels.triton.cache_write import rotate_write  # imports triton
        rotation.apply(rotate_write, plan)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight


def _join(*modules: Any) -> Tensor:
    """Return the modules' weights [N, K] stacked; on an accelerator they become views of the result."""
    weights = [_weight(module) for module in modules]
    if len(weights) == 1:
        return weights[0].contiguous()
    if not is_accelerator(weights[0].device):
        return torch.cat(weights)
    joined = _already_joined(weights)
    if joined is None:
        # Not in inference mode, so that the model can still be trained.
        with torch.inference_mode(False):
            joined = torch.cat(weights)
            for module, part in zip(modules, joined.split([len(weight) for weight in weights]), strict=True):
                module.weight.data = part
    return joined


def _already_joined(weights: list[Tensor]) -> Tensor | None:
    """If an earlier pair has already joined these weights, return the joined tensor, else None."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not (same and weight.is_contiguous() and weight.storage_offset() == end):
            return None
        end += weight.numel()
    width = first.shape[1]
    return first.as_strided(((end - first.storage_offset()) // width, width), (width, 1))


def _block(layer: Any) -> _Layer:
    attn, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        input_norm=_weight(layer.input_layernorm),
        qkv=_join(attn.q_proj, attn.k_proj, attn.v_proj),
        head_norms=None if norms[0] is None else (_weight(norms[0]), _weight(norms[1])),
        output=_join(attn.o_proj),
        mlp_norm=_weight(layer.post_attention_layernorm),
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=_join(mlp.down_proj),
    )
