"""A key-value cache whose rows lie in tiles, for the compiled forward on a CPU (models/llama_compiled.py).

Contract: a RaggedCache of another layout (kernels/cpu/attention/layout.py): `buffer` [layers, 2, max_batch, kv_heads,
tiles, TILE x padded head_dim], of bfloat16 or float32. The forward reads and writes it itself, so it makes no plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.attention.layout import TILE, padded

from .cache import RaggedCache


class TiledCache(RaggedCache):
    """Keys and values in tiles. A row's last tile may have columns behind max_len, which stay unused."""

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
        self.max_batch, self.max_len, self.kv_heads, self.head_dim = max_batch, max_len, kv_heads, head_dim
        size = layers, 2, max_batch, kv_heads, -(-max_len // TILE), TILE * padded(head_dim)
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self.prefix, self.starts, self.groups = prefix, np.zeros(max_batch, np.int64), np.zeros(max_batch, np.int64)

    def attach(self, row: int, group: int, length: int) -> None:
        """The first `length` tokens of a row, a multiple of TILE, are those of row `group` of the prefix."""
        self.starts[row], self.groups[row] = length, group

    def check_room(self, lengths: Sequence[int], queries: int) -> None:
        own = max(length - start for length, start in zip(lengths, self.starts.tolist(), strict=False))
        if own + queries > self.max_len or len(lengths) > self.max_batch:
            raise ValueError(
                f"a step of {len(lengths)} rows x {queries} tokens from length {max(lengths)} does "
                f"not fit a cache of {self.max_batch} rows x {self.max_len} tokens"
            )

    def copy_row(self, source: int, target: int, length: int) -> None:
        own = length - int(self.starts[source])
        self.attach(target, int(self.groups[source]), int(self.starts[source]))
        tiles = -(-own // TILE)
        self.buffer[:, :, target, :, :tiles] = self.buffer[:, :, source, :, :tiles]
