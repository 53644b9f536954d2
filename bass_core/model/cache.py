"""A key-value cache in which every row of the batch has its own length, and rows may share what they begin with.

Contract: one buffer [layers, 2, max_batch, kv_heads, max_len, head_dim] of keys and values, allocated once. The
state of a step is not kept here but in the `AttentionPlan` that `plan` makes for it. The rows of a step are always
rows 0..B-1, and its new keys and values are written at each row's own length. To roll back a rejected draft, plan
the next step with a smaller length: nothing is moved or zeroed, and the next write overwrites stale entries.

A prefix that rows share is a row of `prefix`, a second cache, which is filled as any other. A row that is attached
to it has its first `starts[b]` tokens there, in whole units of SHARE, and token c in its own column c - starts[b].
Lengths always count both. A step of the rows never writes to the prefix. Non-goals: paging, offloading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.plan import SHARE, AttentionPlan, SharedPart, TokenTree
from kernels.reference import cache as reference
from kernels.support import available, is_accelerator

from ..machine.transfer import to_device


class RaggedCache:
    """Keys and values of dtype `dtype`, of `max_batch` rows with `max_len` columns of their own.

    starts, groups: how many tokens of each row are in the prefix, and in which of its rows; `attach` changes them.
    """

    def __init__(
        self,
        layers: int,
        max_batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        prefix: RaggedCache | None = None,
    ) -> None:
        self.prefix, self.starts, self.groups = prefix, [0] * max_batch, [0] * max_batch
        self.max_batch, self.max_len, self.kv_heads, self.head_dim = max_batch, max_len, kv_heads, head_dim
        self.buffer = torch.zeros(layers, 2, max_batch, kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.has_kernel = is_accelerator(self.buffer.device) and available(self.buffer.device)

    def attach(self, row: int, group: int, length: int) -> None:
        """Let a row begin with the first `length` tokens of a row of the prefix, or with none (0).

        Raises ValueError unless the prefix holds so many, and they are whole units of SHARE.
        """
        if length and (self.prefix is None or length % SHARE or length > self.prefix.max_len):
            raise ValueError(f"a row can't share {length} tokens: the prefix holds whole units of {SHARE} tokens")
        self.starts[row], self.groups[row] = length, group

    def detach(self) -> None:
        """No row begins with a prefix."""
        self.starts, self.groups = [0] * self.max_batch, [0] * self.max_batch

    def room(self, lengths: Sequence[int]) -> int:
        """How many more tokens every row of such lengths has columns for."""
        return self.max_len - max(length - start for length, start in zip(lengths, self.starts, strict=False))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, the prefix's included."""
        return self.buffer.nbytes + (0 if self.prefix is None else self.prefix.nbytes)

    def plan(
        self,
        lengths: Sequence[int],
        queries: int,
        window: int | None = None,
        tree: TokenTree | None = None,
    ) -> AttentionPlan:
        """The plan of a step of `queries` new tokens per row over rows that are `lengths` long.

        window, tree: see ForwardBatch. Raises ValueError if the step does not fit the cache.
        """
        self.check_room(lengths, queries)
        batch, host = len(lengths), list(lengths)
        device = self.buffer.device
        plan = AttentionPlan(to_device(host, device), host, queries, gap=window, tree=tree)
        if any(self.starts[:batch]):
            starts, groups = self.starts[:batch], self.groups[:batch]
            plan.shared = self._shared_part(to_device(starts, device), to_device(groups, device), max(starts))
            plan.shared.host_starts, plan.shared.host_groups = starts, groups
        return self._add_views(plan)

    def _shared_part(self, starts: Tensor, groups: Tensor, extent: int) -> SharedPart:
        assert self.prefix is not None
        views = self.prefix.buffer[..., :extent, :].flatten(0, 1).unbind(0)
        return SharedPart(starts, groups, [], [], extent, views)

    def check_room(self, lengths: Sequence[int], queries: int) -> None:
        """Raises ValueError if a step of `queries` new tokens per row over such rows does not fit the cache."""
        if len(lengths) > self.max_batch or queries > self.room(lengths):
            raise ValueError(
                f"a step of {len(lengths)} rows x {queries} tokens from length {max(lengths)} does "
                f"not fit a cache of {self.max_batch} rows x {self.max_len} tokens"
            )

    def plan_captured(
        self,
        lengths: Tensor,
        queries: int,
        extent: int | None = None,
        shared: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
        tree: TokenTree | None = None,
    ) -> AttentionPlan:
        """The plan of a captured step, whose lengths int64 [B] only the device knows.

        shared: starts and groups int64 [B], if the cache has a prefix. Nothing is checked: every row must have
        room for `queries` more tokens in `extent` columns of its own (None: in all).
        """
        plan = AttentionPlan(lengths, [], queries, captured_extent=extent or self.max_len, gap=window, tree=tree)
        if shared is not None and self.prefix is not None:
            plan.shared = self._shared_part(*shared, self.prefix.max_len)
        return self._add_views(plan)

    def _add_views(self, plan: AttentionPlan) -> AttentionPlan:
        """Add the views of all layers, made at once: slicing in every layer would cost more than the copies."""
        plan.views = self.buffer[:, :, : len(plan.lengths), :, : plan.extent].flatten(0, 1).unbind(0)
        return plan

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, S, D] at each row's own end.

        Returns what the step may read: keys and values [B, Hkv, extent, D].
        """
        write = reference.write
        if self.has_kernel:
            from kernels.triton.cache_write import write  # imports triton
        write(keys, values, self.buffer[layer], plan.lengths, None if plan.shared is None else plan.shared.starts)
        return plan.reads(layer)

    def keep(self, row: int, first: int, sources: Sequence[int]) -> None:
        """The row's tokens in columns `sources` become tokens first, first + 1, ...; none moves to the right.

        So the path of a tree that was accepted becomes a text. None of them lies in the prefix. All layers are
        read at once, then written at once; nothing waits for the device.
        """
        own = to_device([source - self.starts[row] for source in sources], self.buffer.device)
        first -= self.starts[row]
        whole = self.buffer[:, :, row]
        whole[..., first : first + len(own), :].copy_(whole.index_select(3, own))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`; a prefix stays where it is."""
        self.starts[target], self.groups[target] = self.starts[source], self.groups[source]
        own = length - self.starts[source]
        self.buffer[:, :, target, :, :own] = self.buffer[:, :, source, :, :own]
