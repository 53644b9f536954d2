"""A short forward for Llama-shaped models on a CPU: four joined matrix products a layer.

Contract: the same `forward` as CausalModel's, equal to the model's own within float32 rounding. The residual
stream is float32 whatever the weights' dtype. For the models that `fits` accepts; others run their own code. The
tricks used here are explained in models/weights/cpu_tricks.py. Non-goals: rotary embeddings that depend on the
length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.backends import BACKENDS
from kernels.plan import AttentionPlan

from ..attention.cache import RaggedCache
from .base import CausalModel, shadow_of
from .forward import CapturedBatch, ForwardBatch, ForwardOutput
from .weights.cpu_linear import PackedLinear, pack_all
from .weights.cpu_tricks import Norm, interleaved, pairs, rotate, turns
from .weights.quantized_modules import QuantizedLinear

_CLASSES = {"LlamaForCausalLM", "Qwen3ForCausalLM"}


def fits(model: PreTrainedModel) -> bool:
    """Whether the model has the shape that this forward computes."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}).get(
        "rope_type", "default"
    )
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    # No others, such as an adapter's, of which this forward knows nothing.
    linears = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    return (
        type(model).__name__ in _CLASSES
        and linears == 7 * config.num_hidden_layers + 1
        and config.hidden_act == "silu"
        and rope in ("default", "linear", "llama3")
        and not windows
    )


@dataclass
class _Layer:
    input_norm: Norm
    qkv: PackedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    output: PackedLinear
    mlp_norm: Norm
    gate_up: PackedLinear
    down: PackedLinear


class LlamaCpu(CausalModel):
    """A Llama or Qwen3 model on a CPU, its weights joined and packed once.

    The residual stream is [N, hidden] for the N real tokens of all rows: a round whose rows drafted 7, 1, 0 and 0
    tokens multiplies 12 vectors, not 32. Only attention sees the rows padded to the longest.
    """

    skips_padding = True
    never_waits = True

    def _prepare(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self.heads: int = config.num_attention_heads
        eps: float = config.rms_norm_eps
        embedding: Any = model.get_input_embeddings()
        self.embedding: Tensor = embedding.weight.detach()
        self.final_norm = Norm(body.norm.weight, eps)
        head: Any = model.get_output_embeddings()
        groups = [group for layer in body.layers for group in _products(layer, self.head_dim)]
        *packed, self.head = pack_all([*groups, (head,)])
        self.low_precision = any(one.compute != torch.float32 for one in (*packed, self.head))
        self.blocks = [_block(layer, packed[4 * i : 4 * i + 4], eps) for i, layer in enumerate(body.layers)]
        self._rotary: Any = shadow_of(body.rotary_emb)
        # For each head of queries, keys and values: which of a position's three factors it is multiplied by.
        self._kinds = torch.tensor([0] * self.heads + [1] * self.kv_heads + [2] * self.kv_heads)
        self._factors = self._make_factors(min(1024, self.context))

    def _make_factors(self, size: int) -> Tensor:
        """Complex factors [size, 3, D / 2] of positions 0..size-1: for queries (scaled), keys, values (all 1)."""
        rotary: Any = self._rotary
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(size)[None])
        keys = turns(cos[0], sin[0])
        return torch.stack((keys * self.head_dim**-0.5, keys, torch.ones_like(keys)), dim=1)

    def _compute(
        self, batch: ForwardBatch | CapturedBatch, plan: AttentionPlan, cache: RaggedCache, backend: str
    ) -> ForwardOutput:
        last = min(plan.longest, self.context)
        if last > self._factors.shape[0]:
            self._factors = self._make_factors(min(2 * last, self.context))
        ids, positions = batch.tokens.flatten(0, 1), self._positions(plan).flatten()
        if plan.tokens is not None:
            ids, positions = ids[plan.tokens], positions[plan.tokens]
        factors = self._factors.index_select(0, positions).index_select(1, self._kinds).flatten(1)
        x = ids.float() if ids.is_floating_point() else F.embedding(ids, self.embedding).float()
        streams = []
        for index, layer in enumerate(self.blocks):
            if batch.return_states and index in self.readout.layers:
                streams.append(x)
            x = self._block(x, index, layer, factors, cache, plan, backend)
        x = self.final_norm(x)
        states = _padded(self.readout(streams, x), plan) if batch.return_states else None
        if batch.take is None:
            return ForwardOutput(_padded(self.head(x), plan), states)
        wanted = torch.arange(len(batch.take)) * plan.queries + torch.tensor(batch.take)
        return ForwardOutput(
            self.head(x[wanted if plan.tokens is None else torch.searchsorted(plan.tokens, wanted)]), states
        )

    def _block(
        self,
        x: Tensor,
        index: int,
        layer: _Layer,
        factors: Tensor,
        cache: RaggedCache,
        plan: AttentionPlan,
        backend: str,
    ) -> Tensor:
        heads, kv, dim = self.heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(layer.input_norm(x))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = qkv.view(-1, heads + 2 * kv, dim).split((heads, kv, kv), dim=1)
            qkv = torch.cat((layer.query_norm(query), layer.key_norm(key), value), dim=1).flatten(1)
        rotate(qkv, factors)
        qkv = qkv.view(-1, heads + 2 * kv, dim)
        queries, states = qkv.split_with_sizes((heads, 2 * kv), 1)
        keys, values = cache.write(index, states.view(-1, 2, kv, dim), plan)
        query = _padded(queries, plan).transpose(1, 2)
        prefix = None if plan.shared is None else plan.shared.reads(index)
        out = BACKENDS[backend](query, keys, values, plan, scaling=1.0, prefix=prefix).reshape(-1, heads * dim)
        x = layer.output(out if plan.tokens is None else out[plan.tokens], x)
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up), x)


def _padded(x: Tensor, plan: AttentionPlan) -> Tensor:
    """x [N, ...] as [B, S, ...]: the real tokens at their places, zeros elsewhere."""
    rows = len(plan.lengths)
    if plan.tokens is not None:
        x = x.new_zeros(rows * plan.queries, *x.shape[1:]).index_copy_(0, plan.tokens, x)
    return x.view(rows, plan.queries, *x.shape[1:])


def _products(layer: Any, head_dim: int) -> list[tuple[nn.Linear, ...]]:
    attn, mlp = layer.self_attn, layer.mlp
    qkv = (interleaved(attn.q_proj, head_dim), interleaved(attn.k_proj, head_dim), attn.v_proj)
    return [qkv, (attn.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]


def _block(layer: Any, packed: list[PackedLinear], eps: float) -> _Layer:
    def head_norm(name: str) -> Norm | None:
        module = getattr(layer.self_attn, name, None)
        return None if module is None else Norm(module.weight[pairs(len(module.weight))], eps)

    qkv, output, gate_up, down = packed
    return _Layer(
        input_norm=Norm(layer.input_layernorm.weight, eps),
        qkv=qkv,
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=output,
        mlp_norm=Norm(layer.post_attention_layernorm.weight, eps),
        gate_up=gate_up,
        down=down,
    )
