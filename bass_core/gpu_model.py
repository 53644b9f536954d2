"""A short forward for Llama-shaped models on a GPU: per layer four products, one rotation, one attention.

Contract: the same `forward` as StepModel, equal to the model's own within rounding. Joined weights (q, k, v and
gate, up) are copies. `plan` says which products run on kernels/linear.py; all others are torch's. Nothing in here
reads lengths on the host, so that every step can be captured in a CUDA graph (graphs.py). Runs on a CPU as well,
in torch, or under Triton's interpreter: slowly, for tests. Non-goals: rotary embeddings that depend on the
length of the text, attention biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels import cache_reference, linear_reference
from kernels.ragged_attention import BACKENDS, RaggedStep
from kernels.support import obstacle

from . import lean
from .cache import RaggedCache
from .memory import available_bytes
from .quantize import is_quantized
from .step_model import StepModel, shadow_of


@dataclass(frozen=True)
class Plan:
    """Up to `most_rows` rows (batch x query tokens) products run on our kernel; at one row only with `gemv`."""

    most_rows: int = 64
    gemv: bool = True

    def takes(self, rows: int, itemsize: int) -> bool:
        """Whether a product of so many rows of that dtype is the kernel's; in float32 it takes 16 at most."""
        most = min(self.most_rows, 64 if itemsize == 2 else 16)
        return rows <= most and (self.gemv or rows > 1)


@dataclass
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def fits(model: PreTrainedModel) -> bool:
    """Whether the model has the shape that this forward computes, with plain weights and no biases."""
    if not lean.fits(model):
        return False
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    plain = all(layer.bias is None for layer in linears) and not is_quantized(model)
    return plain and len(linears) == 7 * model.config.num_hidden_layers + 1


def has_room(model: PreTrainedModel) -> bool:
    """Whether the joined copies of q, k, v and of gate, up fit the device beside the model."""
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    needed = sum(p.nbytes for name, p in model.named_parameters() if name.split(".")[-2] in joined)
    return 1.25 * needed < available_bytes(model.device)


class GpuModel(StepModel):
    """A Llama or Qwen3 model whose weights are joined once; `plan` may be replaced between captures."""

    def _prepare(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self.plan = Plan()
        self.has_kernels = obstacle(self.device) is None
        self.cache_dtype = model.dtype
        self.heads: int = config.num_attention_heads
        self.eps = float(config.rms_norm_eps)
        self.embedding = _weight(model.get_input_embeddings())
        self.head = _weight(model.get_output_embeddings())
        self.final_norm = _weight(body.norm)
        self.blocks = [_block(layer) for layer in body.layers]
        rotary: Any = shadow_of(body.rotary_emb)
        positions = torch.arange(self.context, device=self.device)[None]
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=self.device), positions)
        half = self.head_dim // 2
        self.cos, self.sin = (turn[0, :, :half].float().contiguous() for turn in (cos, sin))

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: RaggedCache,
        step: RaggedStep,
        take: list[int] | None,
        backend: str,
        want: bool,
    ) -> tuple[Tensor, Tensor | None]:
        x = ids.to(self.embedding.dtype) if ids.is_floating_point() else F.embedding(ids, self.embedding)
        streams = []
        for index, layer in enumerate(self.blocks):
            if want and index in self.readout.layers:
                streams.append(x)
            x = self._block(x.contiguous(), index, layer, cache, step, backend)
        states = None
        if want:
            states = self.readout(streams, F.rms_norm(x, (self.hidden,), self.final_norm, self.eps))
        if take is not None:
            rows = torch.arange(len(take), device=x.device)
            x = x[rows, torch.tensor(take, device=x.device)]
        return self.product(x, self.head, norm=self.final_norm), states

    def _block(
        self, x: Tensor, index: int, layer: _Layer, cache: RaggedCache, step: RaggedStep, backend: str
    ) -> Tensor:
        batch, queries, _ = x.shape
        qkv = self.product(x, layer.qkv, norm=layer.input_norm).view(batch, queries, -1, self.head_dim)
        self._rotate_write(qkv, cache.buffer[index], step.lengths, layer.head_norms)
        query = qkv[:, :, : self.heads].transpose(1, 2)
        keys, values = cache.reads(index)
        out = BACKENDS[backend](query, keys, values, step, scaling=self.head_dim**-0.5)
        x = self.product(out.reshape(batch, queries, -1), layer.output, residual=x)
        wide = self.product(x, layer.gate_up, norm=layer.mlp_norm, gate=True)
        return self.product(wide, layer.down, residual=x)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        norm: Tensor | None = None,
        gate: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`linear` of kernels/linear.py, by the kernel where the plan says so, else by torch."""
        if self.has_kernels and self.plan.takes(x.numel() // x.shape[-1], x.itemsize):
            from kernels import linear as module  # imports triton

            return module.linear(x, weight, norm=norm, eps=self.eps, gate=gate, residual=residual)
        return linear_reference.linear(x, weight, norm=norm, eps=self.eps, gate=gate, residual=residual)

    def _rotate_write(
        self, qkv: Tensor, cache: Tensor, lengths: Tensor, norms: tuple[Tensor, Tensor] | None
    ) -> None:
        rotate_write = cache_reference.rotate_write
        if self.has_kernels:
            from kernels.cache_write import rotate_write  # imports triton
        rotate_write(qkv, cache, lengths, self.cos, self.sin, norms, self.eps)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight


def _block(layer: Any) -> _Layer:
    attn, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        input_norm=_weight(layer.input_layernorm),
        qkv=torch.cat([_weight(attn.q_proj), _weight(attn.k_proj), _weight(attn.v_proj)]),
        head_norms=None if norms[0] is None else (_weight(norms[0]), _weight(norms[1])),
        output=_weight(attn.o_proj).contiguous(),
        mlp_norm=_weight(layer.post_attention_layernorm),
        gate_up=torch.cat([_weight(mlp.gate_proj), _weight(mlp.up_proj)]),
        down=_weight(mlp.down_proj).contiguous(),
    )
