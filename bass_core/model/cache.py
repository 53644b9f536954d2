"""A key-value cache in which every row has its own length, and rows may share a prefix.

There is one buffer [layers, 2, max_batch, kv_heads, max_len, head_dim] of keys and values, allocated once. `plan`
makes an `AttentionPlan` with the state of one step; the cache itself keeps no lengths. A step always uses rows 0
to B - 1, and writes new keys and values at each row's length. To drop a rejected draft, plan the next step with a
smaller length: nothing is moved or zeroed, and the next write overwrites the stale entries.

A shared prefix is a row of `prefix`, a second cache that is filled like any other. If a row is attached to a
prefix, its first `starts[b]` tokens (a multiple of PREFIX_UNIT) are there, and token c is in column c - starts[b]
of the row itself. For example, if starts[b] is 64, token 70 is in column 6. Lengths always include the prefix, and
a step of the rows never writes to it. The cache has no pages and is never offloaded.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.plan import PREFIX_UNIT, AttentionPlan, SharedPart, TreeMask
from kernels.reference import cache as reference
from kernels.support import available, is_accelerator

from ..machine.transfer import to_device
from .states import RecurrentStates


class RaggedCache:
    """Keys and values of `max_batch` rows, with `max_len` columns each besides a shared prefix.

    Attributes:
        prefix: the cache of the shared prefixes, or None.
        starts: how many tokens of each row are in its prefix; changed by `attach`.
        groups: the row of `prefix` that each row reads; changed by `attach`.
        states: the states of layers that keep some instead of keys and values, or None.
    """

    states: RecurrentStates | None = None

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
        states: RecurrentStates | None = None,
    ) -> None:
        self.prefix, self.starts, self.groups = prefix, [0] * max_batch, [0] * max_batch
        self.states = states
        self.max_batch, self.max_len, self.kv_heads, self.head_dim = max_batch, max_len, kv_heads, head_dim
        self.buffer = torch.zeros(layers, 2, max_batch, kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.has_kernel = is_accelerator(self.buffer.device) and available(self.buffer.device)
        # For the at most 16 blocks of query rows that the kernel of attention splits into segments.
        self.counters = torch.zeros(16 * max_batch * kv_heads, dtype=torch.int32, device=device)

    def attach(self, row: int, group: int, length: int) -> None:
        """Make a row begin with the first `length` tokens of row `group` of the prefix; length 0 detaches it.

        Raises:
            ValueError: if the prefix is shorter than `length`, or `length` is not a multiple of PREFIX_UNIT.
        """
        if length and (self.prefix is None or length % PREFIX_UNIT or length > self.prefix.max_len):
            raise ValueError(
                f"a row can't share {length} tokens: the prefix holds whole units of {PREFIX_UNIT} tokens"
            )
        self.starts[row], self.groups[row] = length, group
        if length and self.states is not None:
            assert self.prefix is not None and self.prefix.states is not None
            self.states.copy_prefix(self.prefix.states, group, row)

    def detach(self) -> None:
        """Detach all rows from their prefixes."""
        self.starts, self.groups = [0] * self.max_batch, [0] * self.max_batch

    def room(self, lengths: Sequence[int]) -> int:
        """Return how many more tokens fit into every row, if the rows have these lengths."""
        longest: int = max(map(operator.sub, lengths, self.starts))
        return self.max_len - longest

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including the prefix's."""
        return self.buffer.nbytes + (0 if self.prefix is None else self.prefix.nbytes)

    def plan(
        self,
        lengths: Sequence[int],
        queries: int,
        window: int | None = None,
        tree: TreeMask | None = None,
    ) -> AttentionPlan:
        """Plan a step of `queries` new tokens per row, for rows that are `lengths` long.

        `window` and `tree` are as in ForwardBatch.

        Raises:
            ValueError: if the step does not fit the cache.
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
        """Raise ValueError if a step of `queries` new tokens per row does not fit the cache."""
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
        tree: TreeMask | None = None,
    ) -> AttentionPlan:
        """Plan a captured step, whose lengths only the device knows.

        Nothing is checked: every row must have room for `queries` more tokens in its first `extent` columns.

        Args:
            lengths: int64 [B] on the device.
            queries: new tokens per row.
            extent: number of columns that attention reads, None for all.
            shared: starts and groups int64 [B], if the cache has a prefix.
            window: as in ForwardBatch.
            tree: the trees that the new tokens form, or None.
        """
        plan = AttentionPlan(lengths, [], queries, captured_extent=extent or self.max_len, gap=window, tree=tree)
        if shared is not None and self.prefix is not None:
            plan.shared = self._shared_part(*shared, self.prefix.max_len)
        return self._add_views(plan)

    def _add_views(self, plan: AttentionPlan) -> AttentionPlan:
        """Add the views of all layers at once: slicing in every layer would cost more than the copies."""
        plan.counters = self.counters
        plan.views = self.buffer[:, :, : len(plan.lengths), :, : plan.extent].flatten(0, 1).unbind(0)
        return plan

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, S, D] at each row's end.

        Returns:
            The keys and values that the step may read, [B, Hkv, extent, D].
        """
        write = reference.write
        if self.has_kernel:
            from kernels.triton.cache_write import write  # imports triton
        write(keys, values, self.buffer[layer], plan.lengths, None if plan.shared is None else plan.shared.starts)
        return plan.reads(layer)

    def keep(self, row: int, first: int, sources: Sequence[int]) -> None:
        """Move a row's tokens in columns `sources` to columns first, first + 1, ..., always to the left.

        This turns the accepted path of a tree into a text. For example, keep(row, 5, [5, 8]) moves column 8 to
        column 6. None of the columns may be in the prefix. All layers are read at once and then written at once,
        without waiting for the device.
        """
        self.keep_all([(row, first, sources)])

    def keep_all(self, moves: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Do `keep(*move)` for moves in several rows, with one upload and one copy."""
        tokens = [
            (row, source - self.starts[row], first + i - self.starts[row])
            for row, first, sources in moves
            for i, source in enumerate(sources)
        ]
        rows, sources, targets = to_device(list(map(list, zip(*tokens, strict=True))), self.buffer.device)
        self.buffer[:, :, rows, :, targets] = self.buffer[:, :, rows, :, sources]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`; both then share the prefix."""
        self.starts[target], self.groups[target] = self.starts[source], self.groups[source]
        if self.states is not None:
            self.states.copy_row(source, target, length)
        own_length = length - self.starts[source]
        self.buffer[:, :, target, :, :own_length] = self.buffer[:, :, source, :, :own_length]
