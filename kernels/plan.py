"""What the rows of one step look like to attention.

Contract: a plan belongs to one step and is thrown away after it; what its layers share (masks, row ends) is made
once, when a layer first asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class AttentionPlan:
    """Where the rows of one step stand: `lengths` int64 [B] on the device, `host` the same numbers on the host.

    `extent`: columns that any row of this step may see. A captured step is replayed for lengths that the host
    does not know yet, which reach up to `anywhere`. What layers share (masks, `ends`) is made once a step.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    anywhere: int | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _ends: Tensor | None = None

    @property
    def extent(self) -> int:
        return max(self.host) + self.queries if self.anywhere is None else self.anywhere

    @property
    def needs_mask(self) -> bool:
        """False when every query sees every column of the extent (one new token, all rows equally long)."""
        return self.anywhere is not None or self.queries > 1 or min(self.host) != max(self.host)

    @property
    def ends(self) -> Tensor:
        """int32 [B]: how long each row is with its new tokens."""
        if self._ends is None:
            self._ends = (self.lengths + self.queries).to(torch.int32)
        return self._ends

    def hidden(self, window: int | None) -> Tensor:
        """Bool [B, S, extent], true where a query must not look."""
        if window not in self._masks:
            columns = torch.arange(self.extent, device=self.lengths.device)
            last = self.lengths[:, None] + torch.arange(self.queries, device=self.lengths.device)
            last = last[:, :, None]
            hidden = columns > last
            self._masks[window] = hidden if window is None else hidden | (columns <= last - window)
        return self._masks[window]

    def bias(self, window: int | None, group: int, dtype: torch.dtype, kv_heads: int = 1) -> Tensor:
        """[B x kv_heads, group x S, extent], -inf where a query must not look and 0 elsewhere."""
        key = (window, group, dtype, kv_heads)
        if key not in self._biases:
            hidden = self.hidden(window)[:, None, None].expand(-1, kv_heads, group, -1, -1)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[key] = bias.masked_fill_(hidden, float("-inf")).flatten(2, 3).flatten(0, 1)
        return self._biases[key]
