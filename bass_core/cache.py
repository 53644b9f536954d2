"""A key-value cache in which every row of the batch has its own length.

Contract: buffers [max_batch, kv_heads, max_len, head_dim] a layer, allocated once, at the first write; the
rows of a step are always rows 0..B-1. A step writes its new keys and values at each row's own length, which
the caller passes with the step (`begin`). Rolling a rejected draft back is passing a smaller length next time:
nothing is moved or zeroed, and the next write covers what is stale. Non-goals: paging, offloading.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kernels.ragged_attention import RaggedStep


class RaggedCache(Cache):
    """A transformers cache with one length per row. `dtype` is what keys and values are kept in."""

    def __init__(self, layers: int, max_batch: int, max_len: int, dtype: torch.dtype) -> None:
        self.max_batch, self.max_len, self.dtype = max_batch, max_len, dtype
        self.step: RaggedStep | None = None
        self._rows: Tensor | None = None
        self._positions: Tensor | None = None
        # A layer that held its cache would keep the buffers until the garbage collector comes by.
        self.ragged = [_RaggedLayer(weakref.proxy(self)) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def begin(self, host_lengths: list[int], queries: int, device: torch.device) -> RaggedStep:
        """Open a step of `queries` new tokens a row over rows that are `host_lengths` long.

        Raises ValueError when a row would be written past the end of its buffer.
        """
        if max(host_lengths) + queries > self.max_len or len(host_lengths) > self.max_batch:
            raise ValueError(
                f"a step of {len(host_lengths)} rows x {queries} tokens from length {max(host_lengths)} does "
                f"not fit a cache of {self.max_batch} rows x {self.max_len} tokens"
            )
        lengths = torch.tensor(host_lengths, device=device)
        self.step = RaggedStep(lengths, list(host_lengths), queries)
        self._rows = torch.arange(len(host_lengths), device=device)[:, None]
        self._positions = lengths[:, None] + torch.arange(queries, device=device)
        return self.step

    @property
    def positions(self) -> Tensor:
        """Where the tokens of the open step stand: int64 [B, S]."""
        assert self._positions is not None, "begin() opens a step"
        return self._positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys, values [B, Hkv, S, D] at each row's own end; return what this step may read."""
        return self.ragged[layer].update(keys, values)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`."""
        for layer in self.ragged:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length before the open step: what models without explicit positions would use."""
        return max(self.step.host) if self.step else 0


class _RaggedLayer(CacheLayerMixin):
    is_compileable = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length, dtype = self.cache.max_batch, self.cache.max_len, self.cache.dtype
        self.device = key_states.device
        for name, new in (("keys", key_states), ("values", value_states)):
            buffer = torch.zeros(rows, new.shape[1], length, new.shape[3], dtype=dtype, device=self.device)
            setattr(self, name, buffer)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert cache.step is not None and self.keys is not None and self.values is not None
        batch, _, queries, _ = key_states.shape
        if batch == 1:
            start = cache.step.host[0]
            self.keys[0, :, start : start + queries] = key_states[0]
            self.values[0, :, start : start + queries] = value_states[0]
        else:
            at = (cache._rows, slice(None), cache._positions)
            self.keys[at] = key_states.transpose(1, 2).to(cache.dtype)
            self.values[at] = value_states.transpose(1, 2).to(cache.dtype)
        extent = cache.step.extent
        return self.keys[:batch, :, :extent], self.values[:batch, :, :extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.max_len

    def get_max_cache_shape(self) -> int:
        """The same under the name that older transformers use."""
        return self.cache.max_len
