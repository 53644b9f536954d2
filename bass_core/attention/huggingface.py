"""Ragged attention inside transformers' models.

Contract: a model whose attention implementation is NAME attends by the plan that is passed with the call
(`model(..., past_key_values=PlannedCache(cache, plan), ragged=plan, ragged_backend="pad")`), never by a mask. A
layer's sliding window and logit soft-cap are applied; anything else that an architecture adds is refused. A layer
on another device than the cache sends its queries, keys and values to the cache's, and gets the result back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface

from kernels.backends import BACKENDS
from kernels.plan import AttentionPlan

from ..errors import PairError
from .cache import RaggedCache

NAME = "bass_ragged"
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "indices_topk")


class PlannedCache(Cache):
    """A transformers cache for one call: its layers write and read `cache` where the plan says."""

    def __init__(self, cache: RaggedCache, plan: AttentionPlan) -> None:
        super().__init__(layers=[])
        self.cache, self.plan = cache, plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, S, D]; returns what the step may read: [B, Hkv, extent, D] each."""
        key_states, value_states = (one.to(self.cache.buffer.device) for one in (key_states, value_states))
        return self.cache.write(layer_idx, key_states, value_states, self.plan)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length before the step: what models without explicit positions would use."""
        return max(self.plan.host, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.max_len

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The same under the name that older transformers use."""
        return self.cache.max_len


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: AttentionPlan | None = None,
    ragged_backend: str = "pad",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key and value [B, Hkv, extent, D] from RaggedCache.

    Returns ([B, S, Hq, D], None). Raises PairError if the model asks for attention that is not supported.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if ragged is None or asked:
        what = f"attention with {', '.join(asked)}" if asked else "an attention call without row lengths"
        raise PairError(f"{type(module).__name__} needs {what}, which is not supported; choose another model.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    backend = BACKENDS[ragged_backend]
    layer: Any = getattr(module, "layer_idx", None)
    prefix = None if ragged.shared is None else ragged.shared.reads(layer)
    here = query.device
    query = query.to(key.device)
    out = backend(query, key, value, ragged, scaling=scale, window=sliding_window, softcap=softcap, prefix=prefix)
    return out.to(here), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask is built: the lengths say what a query may see."""
    return None


AttentionInterface.register(NAME, ragged_attention)
AttentionMaskInterface.register(NAME, _no_mask)
