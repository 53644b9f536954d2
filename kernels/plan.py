"""The lengths, positions and masks of one step, as attention needs them.

An `AttentionPlan` serves one step and is then discarded. What all layers share (positions, masks, new lengths) is
computed once, when the first layer asks for it. A cache makes the plans of the steps that write to it
(bass_core/model/cache.py); a plan made by hand has no views.

Rows may share a prefix that is stored once (`SharedPart`). If c is below the row's start, token c of the row is
column c of its prefix, otherwise its own column c - start. For example, with a start of 32, token 40 is the row's
own column 8. Lengths and positions count the prefix; extents, masks and biases describe own columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

# Shared prefixes are multiples of this many tokens.
PREFIX_UNIT = 16
# How many of a text's first tokens the queries of a windowed step see besides their window.
SINKS = 64
# The gap of a windowed step begins and ends at multiples of this.
_GAP_UNIT = 64
# The maximum number of tokens of a tree: the bits of one int64 name the tree tokens that a token sees.
MAX_TREE_TOKENS = 63
# With more query rows (group x queries) per key-value head than this, a program of our attention kernel takes all
# columns: compared with the keys and values, sums of parts would need many bytes. Such steps are rotated before.
MAX_SPLIT_ROWS = 256


@dataclass(frozen=True)
class Chunks:
    """A layer that cuts the text into chunks of `size` tokens; a token sees only its own chunk."""

    size: int


# The tokens that a token sees in a layer: the last N tokens including itself, or its chunk.
Window = int | Chunks


def window_start(length: int, window: int) -> int:
    """Return the first column after the gap, if a windowed step sees the last `window` cached tokens of a row.

    The result SINKS means that nothing is hidden. For example, length 1000 and window 256 give 704: columns 64 to
    703 are hidden.
    """
    return max(SINKS, (length - window) // _GAP_UNIT * _GAP_UNIT)


@dataclass
class SharedPart:
    """The prefixes that rows of a step read instead of own columns.

    Attributes:
        starts: int64 [B] on the device, how many tokens of its prefix a row has: a multiple of PREFIX_UNIT, or 0.
        groups: int64 [B] on the device, the prefix of each row; any number for a row without one.
        host_starts, host_groups: the same on the host; empty for a captured step.
        extent: how many columns of the prefixes a row may see at most.
        views: keys and values [G, Hkv, extent, D] of the prefixes in layer 0, then in layer 1, and so on.
    """

    starts: Tensor
    groups: Tensor
    host_starts: list[int]
    host_groups: list[int]
    extent: int
    views: tuple[Tensor, ...] = ()
    _order: Tensor | None = None

    @property
    def order(self) -> Tensor:
        """Return the rows sorted by prefix, those without one last: int64 [B]."""
        if self._order is None:
            last = torch.iinfo(torch.int64).max
            self._order = self.groups.masked_fill(self.starts == 0, last).argsort(stable=True)
        return self._order

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [G, Hkv, extent, D] of a layer's prefixes."""
        return self.views[2 * layer], self.views[2 * layer + 1]


@dataclass
class TreeMask:
    """The trees that a step's new tokens form, one per row, instead of continuing the text.

    A row's tree begins at column base = length - before. Earlier steps wrote its first before[b] columns, and the
    new tokens are the next ones. A tree has at most MAX_TREE_TOKENS tokens, and parents come before children.

    Attributes:
        sees: int64 [B, S] on the device. Token s of row b sees all columns before the base, and column base + j if
            bit j of sees[b, s] is set. These are its ancestors and itself; padding sees only itself.
        depths: int64 [B, S] on the device; the token's position is base + depths[b, s].
        before: int64 [B] on the device.
    """

    sees: Tensor
    depths: Tensor
    before: Tensor


@dataclass
class AttentionPlan:
    """One step with S new tokens in each of B rows.

    Attributes:
        lengths: int64 [B] on the device, tokens cached before the step.
        host: the same on the host; empty for a captured step, which is replayed for lengths that only the device
            knows.
        queries: S.
        captured_extent: own columns that a captured step reads; no row may grow beyond them.
        views: keys and values [B, Hkv, extent, D] that the step may read, of layer 0, then of layer 1, and so on.
        shared: the prefixes that rows share; a row is at least as long as its start.
        gap: None, or in a windowed step the number of tokens in the window. The queries of such a step do not see
            the columns from SINKS up to `window_starts(gap)`.
        tree: the trees that the new tokens form, if any.
        counters: int32 zeros on the device, in which the programs of a launch count each other; each launch leaves
            zeros. Steps that may run at the same time must not share them.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    captured_extent: int | None = None
    views: tuple[Tensor, ...] = ()
    shared: SharedPart | None = None
    gap: int | None = None
    tree: TreeMask | None = None
    counters: Tensor | None = None
    _cached: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return make(), called only once per step and key."""
        if key not in self._cached:
            self._cached[key] = make()
        value: _T = self._cached[key]
        return value

    def zeros(self, count: int) -> Tensor:
        """Return at least `count` of `counters`, made for this step if there are fewer."""
        if self.counters is None or self.counters.numel() < count:
            self.counters = torch.zeros(count, dtype=torch.int32, device=self.lengths.device)
        return self.counters

    @cached_property
    def own_host(self) -> list[int]:
        """Return `own_lengths` on the host; empty for a captured step."""
        if self.shared is None:
            return self.host
        return [length - start for length, start in zip(self.host, self.shared.host_starts, strict=True)]

    @cached_property
    def extent(self) -> int:
        """Return how many own columns a row of this step may see at most."""
        return max(self.own_host) + self.queries if self.captured_extent is None else self.captured_extent

    @property
    def longest(self) -> int:
        """Return a number that is greater than every position in this step."""
        return self.extent + (0 if self.shared is None else self.shared.extent)

    @cached_property
    def needs_mask(self) -> bool:
        """Return False if every query sees the whole extent: one new token per row and equally long rows."""
        if self.captured_extent is not None or self.queries > 1 or self.gap is not None or self.tree is not None:
            return True
        return min(self.own_host) != max(self.own_host)

    @cached_property
    def columns(self) -> Tensor:
        """Return the number of each new token in its row, where its keys and values are stored: int64 [B, S]."""
        return self.lengths[:, None] + torch.arange(self.queries, device=self.lengths.device)

    @cached_property
    def positions(self) -> Tensor:
        """Return the position of each new token in its row's text, int64 [B, S]; siblings in a tree share one."""
        tree = self.tree
        if tree is None:
            return self.columns
        return (self.lengths - tree.before)[:, None] + tree.depths

    @cached_property
    def own_lengths(self) -> Tensor:
        """Return how many own columns of each row were filled before this step: int64 [B]."""
        return self.lengths if self.shared is None else self.lengths - self.shared.starts

    @cached_property
    def new_lengths(self) -> Tensor:
        """Return how many own columns each row has with its new tokens: int32 [B]."""
        return (self.own_lengths + self.queries).to(torch.int32)

    def window_starts(self, window: int) -> Tensor:
        """Return `window_start` of each row: int64 [B]."""

        def make() -> Tensor:
            return ((self.lengths - window) // _GAP_UNIT * _GAP_UNIT).clamp(min=SINKS)

        return self.once(("window starts", window), make)

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, Hkv, extent, D] of a layer that the step may read."""
        return self.views[2 * layer], self.views[2 * layer + 1]

    def mask(self, window: Window | None) -> Tensor:
        """Return bool [B, S, extent], true if a query must not see the column."""

        def make() -> Tensor:
            columns = torch.arange(self.extent, device=self.lengths.device)
            if self.shared is not None:
                columns = columns + self.shared.starts[:, None, None]
            return self.hidden(columns, window)

        return self.once(("mask", window), make)

    def hidden(self, columns: Tensor, window: Window | None) -> Tensor:
        """Return whether each query must not see the row's tokens `columns`: bool [B, S, N].

        Args:
            columns: int64 [N] or [B, 1, N].
        """
        if self.tree is not None:
            return self._hidden_in_tree(self.tree, columns, window)
        last = self.columns[:, :, None]
        hidden = columns > last
        if window is not None:
            hidden = hidden | _outside(columns, last, window)
        if self.gap is not None:
            hidden = hidden | ((columns >= SINKS) & (columns < self.window_starts(self.gap)[:, None, None]))
        return hidden

    def _hidden_in_tree(self, tree: TreeMask, columns: Tensor, window: Window | None) -> Tensor:
        """Return `hidden` for trees; a sliding window counts positions, not columns."""
        base = (self.lengths - tree.before)[:, None, None]
        inside = columns - base
        seen = (tree.sees[:, :, None] >> inside.clamp(0, MAX_TREE_TOKENS)) & 1
        hidden = (inside >= 0) & ((seen == 0) | (inside >= MAX_TREE_TOKENS))
        if window is None:
            return hidden
        # A tree column that a token sees is one of its ancestors, so the column's depth is the number of visible
        # tree columns before it.
        places = torch.arange(MAX_TREE_TOKENS, device=self.lengths.device)
        ranks = ((tree.sees[:, :, None] >> places) & 1).cumsum(-1) - 1
        wide = inside.clamp(0, MAX_TREE_TOKENS - 1).expand(*hidden.shape)
        positions = torch.where(inside < 0, columns, base + ranks.gather(-1, wide))
        return hidden | _outside(positions, self.positions[:, :, None], window)

    def bias(self, window: Window | None, group: int, dtype: torch.dtype, kv_heads: int = 1) -> Tensor:
        """Return [B x kv_heads, group x S, extent]: -inf if a query must not see the column, otherwise 0."""

        def make() -> Tensor:
            mask = self.mask(window)[:, None, None].expand(-1, kv_heads, group, -1, -1)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            return bias.masked_fill_(mask, float("-inf")).flatten(2, 3).flatten(0, 1)

        return self.once(("bias", window, group, dtype, kv_heads), make)


@dataclass
class Rotation:
    """What it takes to rotate a layer's new queries and keys, and to write its keys and values to the cache.

    Attributes:
        qkv: [B, S, Hq + 2 Hkv, D], contiguous: queries, keys and values.
        cache: [2, >=B, Hkv, L, D].
        cos, sin: float32 [positions, D / 2]; the last entry serves all later positions.
        norms: weights [D] of the RMS norms of queries and keys, or None.
        eps: the norms' epsilon.
    """

    qkv: Tensor
    cache: Tensor
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0

    def apply(self, rotate_write: Callable[..., None], plan: AttentionPlan) -> None:
        """Rotate queries in place, and write keys and values, with a kernel or its reference (cache.py)."""
        starts = None if plan.shared is None else plan.shared.starts
        positions = None if plan.tree is None else plan.positions
        rotate_write(
            self.qkv, self.cache, plan.lengths, self.cos, self.sin, self.norms, self.eps, starts, positions
        )

    def fits(self, query: Tensor, key: Tensor) -> bool:
        """Return whether the queries are the first heads of `qkv`, and the keys in `cache`."""
        batch, heads, queries, dim = query.shape
        return (
            self.qkv.is_contiguous()
            and self.qkv.shape == (batch, queries, heads + 2 * key.shape[1], dim)
            and (query.data_ptr(), key.data_ptr()) == (self.qkv.data_ptr(), self.cache.data_ptr())
            and self.cos.dtype == torch.float32
            and 2 * self.cos.shape[1] == dim
        )


def _outside(positions: Tensor, last: Tensor, window: Window) -> Tensor:
    """Return whether a layer's window hides tokens at `positions` from tokens at `last`, as a bool tensor."""
    if isinstance(window, Chunks):
        return positions < last // window.size * window.size
    return positions <= last - window
