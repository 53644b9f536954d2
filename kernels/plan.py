"""The lengths, positions and masks of one step, as attention needs them.

Contract: a plan serves one step and is then discarded. What its layers share (positions, masks, new lengths) is
computed once, when a layer first asks for it. A cache makes the plans of the steps that write to it (see
bass_core/model/cache.py); a plan made by hand has no views.

Rows may share a prefix that is stored once (`SharedPart`). A row's token c is then column c of its prefix if c is
less than the row's start, and its own column c - start if not. Lengths and positions count the prefix; extents,
masks and biases describe own columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")

# Rows share a prefix in whole units of this many tokens.
SHARE = 16
# The tokens at a text's start that the queries of a windowed step see beside their window.
SINKS = 64
# The tokens hidden in a windowed step begin and end at multiples of this.
_GAP_UNIT = 64
# The most columns of a row that a token tree may take: what a token sees of them is one bit each of an int64.
MOST_TREE = 63


@dataclass(frozen=True)
class Chunks:
    """A layer whose tokens see no token before their chunk: chunks of `size` tokens, from the text's start."""

    size: int


# What a layer's tokens see of those before them: the last so many, their own included, or their chunk's.
Window = int | Chunks


def window_start(length: int, window: int) -> int:
    """Where the last `window` of a row's `length` cached tokens begin in a windowed step; SINKS: it hides none."""
    return max(SINKS, (length - window) // _GAP_UNIT * _GAP_UNIT)


@dataclass
class SharedPart:
    """The prefixes that rows of a step read in place of own columns; row b's has its first starts[b] tokens.

    starts: int64 [B], multiples of SHARE, 0 for a row without a prefix; groups: int64 [B], which prefix each row
    reads (any of them, for a row without one). Both are on the device; host_starts and host_groups are the same
    on the host, empty for a captured step. extent: columns of the prefixes that any row may see. views: keys and
    values [G, Hkv, extent, D] of the prefixes in layer 0, then in layer 1, and so on.
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
        """int64 [B]: the rows sorted by prefix, those without one last."""
        if self._order is None:
            last = torch.iinfo(torch.int64).max
            self._order = self.groups.masked_fill(self.starts == 0, last).argsort(stable=True)
        return self._order

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, Hkv, extent, D] of a layer's prefixes."""
        return self.views[2 * layer], self.views[2 * layer + 1]


@dataclass
class TokenTree:
    """The trees that the new tokens of a step form, one a row, instead of a text.

    A row's tree begins at column base = length - before: its first before[b] columns were fed in earlier steps,
    the row's new tokens are the next ones, at most MOST_TREE in all. Parents come before their children. New token
    s of row b sees the columns before the base, and column base + j if bit j of sees[b, s] is set: its ancestors
    and itself. Its position is base + depths[b, s].

    sees, depths: int64 [B, S] on the device; padding tokens see themselves alone. before: int64 [B] on the device.
    """

    sees: Tensor
    depths: Tensor
    before: Tensor


@dataclass
class AttentionPlan:
    """S = `queries` new tokens for each of B rows; `lengths` int64 [B] (on the device): tokens cached before.

    host: the same lengths on the host; empty for a captured step, which is replayed for lengths that only the
    device knows. captured_extent: the own columns that a captured step reads; no row may grow beyond them.
    shared: the prefixes that rows share; no row is shorter than its start. gap: in a step with a window, the
    window's tokens: queries see no column from SINKS up to `window_starts(gap)`. None: they see all.
    views: what the step may read: keys and values [B, Hkv, extent, D] of layer 0, then of layer 1, and so on.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    captured_extent: int | None = None
    views: tuple[Tensor, ...] = ()
    shared: SharedPart | None = None
    gap: int | None = None
    tree: TokenTree | None = None
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """What `make` returns, which is called once a step for each key."""
        if key not in self._made:
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    @property
    def own_host(self) -> list[int]:
        """`own_lengths` on the host; empty for a captured step."""
        if self.shared is None:
            return self.host
        return [length - start for length, start in zip(self.host, self.shared.host_starts, strict=True)]

    @property
    def extent(self) -> int:
        """Own columns that any row of this step may see."""
        return max(self.own_host) + self.queries if self.captured_extent is None else self.captured_extent

    @property
    def longest(self) -> int:
        """All positions of this step are below this."""
        return self.extent + (0 if self.shared is None else self.shared.extent)

    @property
    def needs_mask(self) -> bool:
        """False when every query sees every column of the extent (one new token, all rows equally long)."""
        if self.captured_extent is not None or self.queries > 1 or self.gap is not None or self.tree is not None:
            return True
        return min(self.own_host) != max(self.own_host)

    @property
    def columns(self) -> Tensor:
        """int64 [B, S]: the token number of each new token in its row, by which its keys and values are stored."""
        device = self.lengths.device
        return self.once("columns", lambda: self.lengths[:, None] + torch.arange(self.queries, device=device))

    @property
    def positions(self) -> Tensor:
        """int64 [B, S]: the position of each new token in its row's text; in a tree siblings have the same."""
        tree = self.tree
        if tree is None:
            return self.columns
        return self.once("positions", lambda: (self.lengths - tree.before)[:, None] + tree.depths)

    @property
    def own_lengths(self) -> Tensor:
        """int64 [B]: the own columns of each row that were filled before this step."""
        shared = self.shared
        if shared is None:
            return self.lengths
        return self.once("own lengths", lambda: self.lengths - shared.starts)

    @property
    def new_lengths(self) -> Tensor:
        """int32 [B]: the own columns of each row including its new tokens."""
        return self.once("new lengths", lambda: (self.own_lengths + self.queries).to(torch.int32))

    def window_starts(self, window: int) -> Tensor:
        """int64 [B]: `window_start` of each row."""

        def make() -> Tensor:
            return ((self.lengths - window) // _GAP_UNIT * _GAP_UNIT).clamp(min=SINKS)

        return self.once(("window starts", window), make)

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, extent, D] of a layer that the step may read."""
        return self.views[2 * layer], self.views[2 * layer + 1]

    def mask(self, window: Window | None) -> Tensor:
        """Bool [B, S, extent], true where a query must not look."""

        def make() -> Tensor:
            columns = torch.arange(self.extent, device=self.lengths.device)
            if self.shared is not None:
                columns = columns + self.shared.starts[:, None, None]
            return self.hidden(columns, window)

        return self.once(("mask", window), make)

    def hidden(self, columns: Tensor, window: Window | None) -> Tensor:
        """Bool [B, S, N], true where a query must not look at a row's tokens `columns`, int64 [N] or [B, 1, N]."""
        if self.tree is not None:
            return self._hidden_in_tree(self.tree, columns, window)
        last = self.columns[:, :, None]
        hidden = columns > last
        if window is not None:
            hidden = hidden | _outside(columns, last, window)
        if self.gap is not None:
            hidden = hidden | ((columns >= SINKS) & (columns < self.window_starts(self.gap)[:, None, None]))
        return hidden

    def _hidden_in_tree(self, tree: TokenTree, columns: Tensor, window: Window | None) -> Tensor:
        """`hidden` where the new tokens form trees; a sliding window is measured in positions, not columns."""
        base = (self.lengths - tree.before)[:, None, None]
        inside = columns - base
        seen = (tree.sees[:, :, None] >> inside.clamp(0, MOST_TREE)) & 1
        hidden = (inside >= 0) & ((seen == 0) | (inside >= MOST_TREE))
        if window is None:
            return hidden
        # A column that a token sees in the tree is one of its ancestors: as deep as it sees columns up to it.
        places = torch.arange(MOST_TREE, device=self.lengths.device)
        ranks = ((tree.sees[:, :, None] >> places) & 1).cumsum(-1) - 1
        wide = inside.clamp(0, MOST_TREE - 1).expand(*hidden.shape)
        positions = torch.where(inside < 0, columns, base + ranks.gather(-1, wide))
        return hidden | _outside(positions, self.positions[:, :, None], window)

    def bias(self, window: Window | None, group: int, dtype: torch.dtype, kv_heads: int = 1) -> Tensor:
        """[B x kv_heads, group x S, extent], -inf where a query must not look and 0 elsewhere."""

        def make() -> Tensor:
            mask = self.mask(window)[:, None, None].expand(-1, kv_heads, group, -1, -1)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            return bias.masked_fill_(mask, float("-inf")).flatten(2, 3).flatten(0, 1)

        return self.once(("bias", window, group, dtype, kv_heads), make)


def _outside(positions: Tensor, last: Tensor, window: Window) -> Tensor:
    """Bool, true where a token at `last` does not see one at `positions` because of the layer's window."""
    if isinstance(window, Chunks):
        return positions < last // window.size * window.size
    return positions <= last - window
