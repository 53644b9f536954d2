"""A short forward for Llama-shaped models on a CPU: four joined matrix products a layer.

Contract: the same `forward` as CausalModel, equal to the model's own within float32 rounding. The residual stream
is float32 whatever the weights are. Only the shapes listed in `fits` take this way; all others run their own
code. Non-goals: scaled rotary embeddings that depend on the length of the text.
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
from .weights.cpu_linear import PackedLinear, pack_all

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


class _Norm:
    """RMSNorm of vectors [..., n] with n weights: x / |x, e| * w, where e = sqrt(n eps) and w holds sqrt(n).

    Four short kernels where F.rms_norm launches seven: on a CPU the launches are what costs.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        root = len(weight) ** 0.5
        self.weight = weight.detach().float() * root
        self.least = torch.tensor(root * eps**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least)
        return (x / length).mul_(self.weight)


@dataclass
class _Layer:
    input_norm: _Norm
    qkv: PackedLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: PackedLinear
    mlp_norm: _Norm
    gate_up: PackedLinear
    down: PackedLinear


class LlamaCpu(CausalModel):
    """A Llama or Qwen3 model on a CPU, its weights joined and packed once.

    The residual stream is [N, hidden], N the real tokens of all rows: a round whose rows drafted 7, 1, 0 and 0
    tokens multiplies 12 vectors and not 32. Attention alone sees the rows padded to the longest.
    """

    skips_padding = True
    never_waits = True

    def _prepare(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self.heads: int = config.num_attention_heads
        eps: float = config.rms_norm_eps
        embedding: Any = model.get_input_embeddings()
        self.embedding: Tensor = embedding.weight.detach()
        self.final_norm = _Norm(body.norm.weight, eps)
        head: Any = model.get_output_embeddings()
        groups = [group for layer in body.layers for group in _products(layer, self.head_dim)]
        *packed, self.head = pack_all([*groups, (head,)])
        self.low_precision = any(one.compute != torch.float32 for one in (*packed, self.head))
        self.blocks = [_block(layer, packed[4 * i : 4 * i + 4], eps) for i, layer in enumerate(body.layers)]
        self._rotary: Any = shadow_of(body.rotary_emb)
        # Which factor of a position turns each head of queries (scaled for attention), keys and values.
        self._kinds = torch.tensor([0] * self.heads + [1] * self.kv_heads + [2] * self.kv_heads)
        self._turns = self._make_turns(min(1024, self.context))

    def _make_turns(self, size: int) -> Tensor:
        """Complex factors [size, 3, D / 2] that turn the queries, keys and values of positions 0..size-1."""
        rotary: Any = self._rotary
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(size)[None])
        half = self.head_dim // 2
        turns = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        return torch.stack((turns * self.head_dim**-0.5, turns, torch.ones_like(turns)), dim=1)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: RaggedCache,
        step: AttentionPlan,
        take: list[int] | None,
        backend: str,
        want: bool,
    ) -> tuple[Tensor, Tensor | None]:
        last = min(max(step.host) + step.queries, self.context)
        if last > self._turns.shape[0]:
            self._turns = self._make_turns(min(2 * last, self.context))
        ids, positions, tokens = ids.flatten(0, 1), positions.flatten(), cache.tokens
        if tokens is not None:
            ids, positions = ids[tokens], positions[tokens]
        turns = self._turns.index_select(0, positions).index_select(1, self._kinds).flatten(1)
        x = ids.float() if ids.is_floating_point() else F.embedding(ids, self.embedding).float()
        streams = []
        for index, layer in enumerate(self.blocks):
            if want and index in self.readout.layers:
                streams.append(x)
            x = self._block(x, index, layer, turns, cache, step, backend)
        x = self.final_norm(x)
        states = _padded(self.readout(streams, x), step, tokens) if want else None
        if take is None:
            return _padded(self.head(x), step, tokens), states
        wanted = torch.arange(len(take)) * step.queries + torch.tensor(take)
        return self.head(x[wanted if tokens is None else torch.searchsorted(tokens, wanted)]), states

    def _block(
        self,
        x: Tensor,
        index: int,
        layer: _Layer,
        turns: Tensor,
        cache: RaggedCache,
        step: AttentionPlan,
        backend: str,
    ) -> Tensor:
        heads, kv, dim = self.heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(layer.input_norm(x))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = qkv.view(-1, heads + 2 * kv, dim).split((heads, kv, kv), dim=1)
            qkv = torch.cat((layer.query_norm(query), layer.key_norm(key), value), dim=1).flatten(1)
        qkv.view(torch.complex64).mul_(turns)
        qkv = qkv.view(-1, heads + 2 * kv, dim)
        queries, states = qkv.split_with_sizes((heads, 2 * kv), 1)
        keys, values = cache.write(index, states.view(-1, 2, kv, dim))
        query = _padded(queries, step, cache.tokens).transpose(1, 2)
        out = BACKENDS[backend](query, keys, values, step, scaling=1.0).reshape(-1, heads * dim)
        x = layer.output(out if cache.tokens is None else out[cache.tokens], x)
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up), x)


def _padded(x: Tensor, step: AttentionPlan, tokens: Tensor | None) -> Tensor:
    """[N, ...] as [B, S, ...]: the real tokens at their places, zeros elsewhere."""
    rows = len(step.host)
    if tokens is not None:
        x = x.new_zeros(rows * step.queries, *x.shape[1:]).index_copy_(0, tokens, x)
    return x.view(rows, step.queries, *x.shape[1:])


def _products(layer: Any, head_dim: int) -> list[tuple[nn.Linear, ...]]:
    attn, mlp = layer.self_attn, layer.mlp
    qkv = (_interleaved(attn.q_proj, head_dim), _interleaved(attn.k_proj, head_dim), attn.v_proj)
    return [qkv, (attn.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]


def _interleaved(layer: nn.Linear, head_dim: int) -> nn.Linear:
    """The layer with dimensions i and i + D / 2 of each head side by side, as a complex number has its parts.

    Queries and keys change alike, so their products stay what they were, and rotating is one product.
    """
    weight, bias = layer.weight.detach(), layer.bias
    result = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None, device="meta")
    rows = torch.arange(layer.out_features).view(-1, head_dim)[:, _pairs(head_dim)].flatten()
    result.weight = nn.Parameter(weight[rows], requires_grad=False)
    if bias is not None:
        result.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
    return result


def _pairs(head_dim: int) -> Tensor:
    return torch.arange(head_dim).view(2, -1).T.flatten()


def _block(layer: Any, packed: list[PackedLinear], eps: float) -> _Layer:
    def head_norm(name: str) -> _Norm | None:
        module = getattr(layer.self_attn, name, None)
        return None if module is None else _Norm(module.weight[_pairs(len(module.weight))], eps)

    qkv, output, gate_up, down = packed
    return _Layer(
        input_norm=_Norm(layer.input_layernorm.weight, eps),
        qkv=qkv,
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=output,
        mlp_norm=_Norm(layer.post_attention_layernorm.weight, eps),
        gate_up=gate_up,
        down=down,
    )
