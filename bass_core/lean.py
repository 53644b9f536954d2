"""A short forward for Llama-shaped models on a CPU: four joined matrix products a layer.

Contract: the same `forward` as StepModel, equal to the model's own within float32 rounding. The residual stream
is float32 whatever the weights are. Only the shapes listed in `fits` take this way; all others run their own
code. Non-goals: scaled rotary embeddings that depend on the length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kernels.ragged_attention import BACKENDS, RaggedStep

from .cache import RaggedCache
from .packed import PackedLinear
from .step_model import StepModel, shadow_of

_CLASSES = {"LlamaForCausalLM", "Qwen3ForCausalLM"}


def fits(model: PreTrainedModel) -> bool:
    """Whether the model has the shape that this forward computes."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}).get(
        "rope_type", "default"
    )
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    return (
        type(model).__name__ in _CLASSES
        and config.hidden_act == "silu"
        and rope in ("default", "linear", "llama3")
        and not windows
    )


@dataclass
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class LeanModel(StepModel):
    """A Llama or Qwen3 model on a CPU, its weights joined and packed once."""

    def _prepare(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self.heads: int = config.num_attention_heads
        self.eps = torch.tensor(config.rms_norm_eps)
        embedding: Any = model.get_input_embeddings()
        self.embedding: Tensor = embedding.weight.detach()
        self.final_norm = body.norm.weight.detach().float()
        self.head = PackedLinear(model.get_output_embeddings())
        self.blocks = [_pack_layer(layer) for layer in body.layers]
        self._rotary: Any = shadow_of(body.rotary_emb)
        self._tables = self._rotary_tables(min(1024, self.context))

    def _rotary_tables(self, size: int) -> tuple[Tensor, Tensor]:
        """cos and sin [size, 1, D], the sine signed so that rotating is one roll and two products."""
        probe = torch.zeros(1, dtype=torch.float32)
        rotary: Any = self._rotary
        cos, sin = rotary(probe, torch.arange(size)[None])
        half = self.head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[0, :, None].float(), sin[0, :, None].float()

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: RaggedCache,
        step: RaggedStep,
        take: list[int] | None,
        backend: str,
    ) -> Tensor:
        last = min(max(step.host) + step.queries, self.context)
        tables = self._tables
        if last > tables[0].shape[0]:
            self._tables = tables = self._rotary_tables(min(2 * last, self.context))
        rotary = (tables[0][positions], tables[1][positions])
        x = F.embedding(ids, self.embedding).float()
        for index, layer in enumerate(self.blocks):
            x = self._block(x, index, layer, rotary, cache, step, backend)
        if take is not None:
            x = x[torch.arange(len(take)), torch.tensor(take)]
        return self.head(self._norm(x, self.final_norm))

    def _block(
        self,
        x: Tensor,
        index: int,
        layer: _Layer,
        rotary: tuple[Tensor, Tensor],
        cache: RaggedCache,
        step: RaggedStep,
        backend: str,
    ) -> Tensor:
        batch, queries, _ = x.shape
        kv, heads = self.kv_heads, self.heads
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(batch, queries, heads + 2 * kv, self.head_dim)
        turning = qkv[:, :, : heads + kv]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(turning[:, :, :heads], layer.query_norm)
            turning = torch.cat((query, self._norm(turning[:, :, heads:], layer.key_norm)), dim=2)
        turned = turning.roll(self.head_dim // 2, -1).mul_(rotary[1])
        turning = turned.addcmul_(turning, rotary[0])
        query, key = turning.transpose(1, 2).split((heads, kv), dim=1)
        keys, values = cache.write(index, key, qkv[:, :, heads + kv :].transpose(1, 2))
        out = BACKENDS[backend](query, keys, values, step, scaling=self.head_dim**-0.5)
        x = layer.output(out.reshape(batch, queries, -1), x)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up), x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # Four short kernels where F.rms_norm launches seven: on a CPU the launches are what costs.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)


def _pack_layer(layer: Any) -> _Layer:
    attn, mlp = layer.self_attn, layer.mlp

    def norm(name: str) -> Tensor | None:
        module = getattr(attn, name, None)
        return None if module is None else module.weight.detach().float()

    return _Layer(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=PackedLinear(attn.q_proj, attn.k_proj, attn.v_proj),
        query_norm=norm("q_norm"),
        key_norm=norm("k_norm"),
        output=PackedLinear(attn.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate_up=PackedLinear(mlp.gate_proj, mlp.up_proj),
        down=PackedLinear(mlp.down_proj),
    )
