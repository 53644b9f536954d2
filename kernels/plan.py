"""The lengths, positions and masks of one step, as attention needs them.

Contract: a plan serves one step and is then discarded. What its layers share (positions, masks, new lengths) is
computed once, when a layer first asks for it. A cache makes the plans of the steps that write to it (see
bass_core/attention/cache.py); a plan made by hand has no views.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class AttentionPlan:
    """S = `queries` new tokens for each of B rows; `lengths` int64 [B] (on the device): tokens cached before.

    host: the same lengths on the host; empty for a captured step, which is replayed for lengths that only the
    device knows. captured_extent: the columns that a captured step reads; no row may grow beyond them.
    tokens: int64 [N], indices of the real tokens in the flattened [B x S] step; None if all are real.
    places: int64 [2 x Hkv x N], where their keys and values go in a layer's cache, seen as vectors of head_dim.
    ends: for a batch of one, the view [2, Hkv, N, D] of each layer's cache to which they go.
    views: what the step may read: keys and values [B, Hkv, extent, D] of layer 0, then of layer 1, and so on.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    captured_extent: int | None = None
    tokens: Tensor | None = None
    places: Tensor | None = None
    ends: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()
    _positions: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _new_lengths: Tensor | None = None

    @property
    def extent(self) -> int:
        """Columns of the cache that any row of this step may see."""
        return max(self.host) + self.queries if self.captured_extent is None else self.captured_extent

    @property
    def needs_mask(self) -> bool:
        """False when every query sees every column of the extent (one new token, all rows equally long)."""
        return self.captured_extent is not None or self.queries > 1 or min(self.host) != max(self.host)

    @property
    def positions(self) -> Tensor:
        """int64 [B, S]: the position of each new token in its row."""
        if self._positions is None:
            self._positions = self.lengths[:, None] + torch.arange(self.queries, device=self.lengths.device)
        return self._positions

    @property
    def new_lengths(self) -> Tensor:
        """int32 [B]: the length of each row including its new tokens."""
        if self._new_lengths is None:
            self._new_lengths = (self.lengths + self.queries).to(torch.int32)
        return self._new_lengths

    def reads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, extent, D] of a layer that the step may read."""
        return self.views[2 * layer], self.views[2 * layer + 1]

    def mask(self, window: int | None) -> Tensor:
        """Bool [B, S, extent], true where a query must not look."""
        if window not in self._masks:
            columns = torch.arange(self.extent, device=self.lengths.device)
            last = self.positions[:, :, None]
            hidden = columns > last
            self._masks[window] = hidden if window is None else hidden | (columns <= last - window)
        return self._masks[window]

    def bias(self, window: int | None, group: int, dtype: torch.dtype, kv_heads: int = 1) -> Tensor:
        """[B x kv_heads, group x S, extent], -inf where a query must not look and 0 elsewhere."""
        key = (window, group, dtype, kv_heads)
        if key not in self._biases:
            mask = self.mask(window)[:, None, None].expand(-1, kv_heads, group, -1, -1)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._biases[key] = bias.masked_fill_(mask, float("-inf")).flatten(2, 3).flatten(0, 1)
        return self._biases[key]
