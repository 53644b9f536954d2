"""A key-value cache in which every row of the batch has its own length.

Contract: one buffer [layers, 2, max_batch, kv_heads, max_len, head_dim] of keys and values, allocated once. The
state of a step is not kept here but in the `AttentionPlan` that `plan` makes for it. The rows of a step are always
rows 0..B-1, and its new keys and values are written at each row's own length. To roll back a rejected draft, plan
the next step with a smaller length: nothing is moved or zeroed, and the next write overwrites stale entries.
Non-goals: paging, offloading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.plan import AttentionPlan
from kernels.support import available, is_accelerator

from ..machine.transfer import to_device


class RaggedCache:
    """Keys and values of dtype `dtype`, with one length per row."""

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
        # Each layer as vectors [2 x max_batch x kv_heads x max_len, head_dim], and the offsets of rows and heads.
        self._vectors = self.buffer.view(layers, -1, head_dim).unbind(0)
        self._firsts = torch.arange(max_batch, device=device)[:, None] * kv_heads * max_len
        kinds = torch.arange(2, device=device)[:, None] * max_batch * kv_heads
        self._heads = ((kinds + torch.arange(kv_heads, device=device)) * max_len).flatten()
        self.has_kernel = is_accelerator(self.buffer.device) and available(self.buffer.device)

    def plan(self, lengths: Sequence[int], queries: int, counts: list[int] | None = None) -> AttentionPlan:
        """The plan of a step of `queries` new tokens per row over rows that are `lengths` long.

        With `counts`, only the first counts[b] tokens of row b are written. Raises ValueError if the step does not
        fit the cache.
        """
        self.check_room(lengths, queries)
        batch, host = len(lengths), list(lengths)
        device = self.buffer.device
        plan = self._with_views(AttentionPlan(to_device(host, device), host, queries))
        if counts is not None and min(counts) < queries:
            real = torch.arange(queries, device=device) < to_device(counts, device)[:, None]
            plan.tokens = real.flatten().nonzero()[:, 0]
        if batch == 1:
            written = queries if plan.tokens is None else len(plan.tokens)
            plan.ends = self.buffer[:, :, 0, :, host[0] : host[0] + written].unbind(0)
        return plan

    def check_room(self, lengths: Sequence[int], queries: int) -> None:
        """Raises ValueError if a step of `queries` new tokens per row over such rows does not fit the cache."""
        if max(lengths) + queries > self.max_len or len(lengths) > self.max_batch:
            raise ValueError(
                f"a step of {len(lengths)} rows x {queries} tokens from length {max(lengths)} does "
                f"not fit a cache of {self.max_batch} rows x {self.max_len} tokens"
            )

    def plan_captured(self, lengths: Tensor, queries: int, extent: int | None = None) -> AttentionPlan:
        """The plan of a captured step, whose lengths int64 [B] only the device knows.

        Nothing is checked: every row must have room for `queries` more tokens in `extent` columns (None: in all).
        """
        return self._with_views(AttentionPlan(lengths, [], queries, captured_extent=extent or self.max_len))

    def _with_views(self, plan: AttentionPlan) -> AttentionPlan:
        """Add the views of all layers, made at once: slicing in every layer would cost more than the copies."""
        plan.views = self.buffer[:, :, : len(plan.lengths), :, : plan.extent].flatten(0, 1).unbind(0)
        return plan

    def write(self, layer: int, states: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Write states [N, 2, Hkv, D] (keys, then values) at each row's own end; N = B x S, or the real tokens.

        Returns what the step may read: keys and values [B, Hkv, extent, D].
        """
        if plan.ends:
            plan.ends[layer].copy_(states.permute(1, 2, 0, 3))
            return plan.reads(layer)
        if plan.places is None:
            plan.places = self._places(plan)
        vectors = states.reshape(-1, self.head_dim).to(self.buffer.dtype)
        self._vectors[layer].index_copy_(0, plan.places, vectors)
        return plan.reads(layer)

    def _places(self, plan: AttentionPlan) -> Tensor:
        starts = (plan.positions + self._firsts[: len(plan.positions)]).flatten()
        starts = starts if plan.tokens is None else starts[plan.tokens]
        return (starts[:, None] + self._heads).flatten()

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`."""
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]
