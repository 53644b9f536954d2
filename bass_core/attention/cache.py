"""A key-value cache in which every row of the batch has its own length.

Contract: one buffer [layers, 2, max_batch, kv_heads, max_len, head_dim] of keys and values, allocated once; the
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

from kernels.plan import AttentionPlan
from kernels.support import available, is_accelerator

from ..machine.transfer import to_device


class RaggedCache(Cache):
    """A transformers cache with one length per row. `dtype` is what keys and values are kept in."""

    def __init__(
        self,
        layers: int,
        max_batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_batch, self.max_len, self.kv_heads, self.head_dim = max_batch, max_len, kv_heads, head_dim
        self.buffer = torch.zeros(layers, 2, max_batch, kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.step: AttentionPlan | None = None
        # Each layer as vectors [2 x max_batch x kv_heads x max_len, head_dim]; where rows and heads begin there.
        self._vectors = self.buffer.view(layers, -1, head_dim).unbind(0)
        self._columns = torch.arange(max_len, device=device)
        self._firsts = torch.arange(max_batch, device=device)[:, None] * kv_heads * max_len
        kinds = torch.arange(2, device=device)[:, None] * max_batch * kv_heads
        self._heads = ((kinds + torch.arange(kv_heads, device=device)) * max_len).flatten()
        self.has_kernel = is_accelerator(self.buffer.device) and available(self.buffer.device)
        # Views of one step for all layers, made once: slicing in every layer costs more than the copies.
        self.tokens: Tensor | None = None
        self._places: Tensor | None = None
        self._reads: tuple[Tensor, ...] = ()
        self._ends: tuple[Tensor, ...] = ()
        # A layer that held its cache would keep the buffer until the garbage collector comes by.
        self.ragged = [_RaggedLayer(weakref.proxy(self), layer) for layer in range(layers)]
        super().__init__(layers=list(self.ragged))

    def begin(self, host_lengths: list[int], queries: int, counts: list[int] | None = None) -> AttentionPlan:
        """Open a step of `queries` new tokens a row over rows that are `host_lengths` long.

        With `counts` only the first counts[b] tokens of row b are written: `tokens` int64 [N] says where these
        stand in the flattened [B x S] step; it is None where all of them count.
        Raises ValueError when a row would be written past the end of its buffer.
        """
        batch = len(host_lengths)
        if max(host_lengths) + queries > self.max_len or batch > self.max_batch:
            raise ValueError(
                f"a step of {batch} rows x {queries} tokens from length {max(host_lengths)} does "
                f"not fit a cache of {self.max_batch} rows x {self.max_len} tokens"
            )
        device = self.buffer.device
        self.tokens = None
        if counts is not None and min(counts) < queries:
            real = torch.arange(queries, device=device) < to_device(counts, device)[:, None]
            self.tokens = real.flatten().nonzero()[:, 0]
        step = self._open(AttentionPlan(to_device(host_lengths, device), list(host_lengths), queries))
        if batch == 1:
            start, written = host_lengths[0], queries if self.tokens is None else len(self.tokens)
            self._ends = self.buffer[:, :, 0, :, start : start + written].unbind(0)
        return step

    def begin_anywhere(self, lengths: Tensor, queries: int, extent: int | None = None) -> AttentionPlan:
        """Open a step whose lengths int64 [B] only the device knows, as a captured forward needs it.

        Nothing is checked: every row must have room for `queries` more tokens in `extent` columns (None: in all).
        """
        self.tokens = None
        return self._open(AttentionPlan(lengths, [], queries, anywhere=extent or self.max_len))

    def _open(self, step: AttentionPlan) -> AttentionPlan:
        batch = len(step.lengths)
        self.step = step
        self.positions = step.lengths[:, None] + self._columns[: step.queries]
        self._places = None
        self._reads = self.buffer[:, :, :batch, :, : step.extent].flatten(0, 1).unbind(0)
        self._ends = ()
        return step

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, extent, D] that the open step may read."""
        return self._reads[2 * layer], self._reads[2 * layer + 1]

    def write(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Put states [N, 2, Hkv, D], keys before values, at each row's own end; N = B x S, or the real tokens.

        Returns what this step may read: keys and values [B, Hkv, extent, D].
        """
        if self._ends:
            self._ends[layer].copy_(states.permute(1, 2, 0, 3))
            return self.reads(layer)
        if self._places is None:
            starts = (self.positions + self._firsts[: len(self.positions)]).flatten()
            starts = starts if self.tokens is None else starts[self.tokens]
            self._places = (starts[:, None] + self._heads).flatten()
        vectors = states.reshape(-1, self.head_dim).to(self.buffer.dtype)
        self._vectors[layer].index_copy_(0, self._places, vectors)
        return self.reads(layer)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`."""
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length before the open step: what models without explicit positions would use."""
        return max(self.step.host, default=0) if self.step else 0


class _RaggedLayer(CacheLayerMixin):
    is_compileable = False

    def __init__(self, cache: RaggedCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.keys, self.values = cache.buffer[layer]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the buffer was made with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.cache.has_kernel and self.cache.step is not None:
            from kernels.triton.cache_write import write  # imports triton

            write(key_states, value_states, self.cache.buffer[self.layer], self.cache.step.lengths)
            return self.cache.reads(self.layer)
        states = torch.stack((key_states, value_states)).permute(1, 3, 0, 2, 4)
        return self.cache.write(self.layer, states.flatten(0, 1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.max_len

    def get_max_cache_shape(self) -> int:
        """The same under the name that older transformers use."""
        return self.cache.max_len
