"""A key-value cache whose rows lie in tiles, for the compiled forward on a CPU (model/llama_cpu.py).

Contract: a RaggedCache of another layout (kernels/cpu/attention/layout.py): `buffer` [layers, 2, max_batch,
kv_heads, tiles, TILE x padded head_dim], of bfloat16 or float32. The forward reads and writes it itself, so it
makes no plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.attention.layout import TILE, padded, tiles_of
from kernels.cpu.pages import in_large_pages

from .cache import RaggedCache


class TiledCache(RaggedCache):
    """Keys and values in tiles. A row's last tile may have columns after max_len, which stay unused."""

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
        size = layers, 2, max_batch, kv_heads, tiles_of(max_len), TILE * padded(head_dim)
        data = in_large_pages(math.prod(size) * dtype.itemsize)
        self.buffer = torch.from_numpy(data).view(dtype).view(size)

    def keep(self, row: int, first: int, sources: Sequence[int]) -> None:
        from kernels.cpu.attention.paths import move  # imports numba

        layers, _, rows, kv_heads, tiles, _ = self.buffer.shape
        start = self.starts[row]
        own = np.array(sources, np.int64) - start
        head = self.head_dim, padded(self.head_dim), self.buffer.dtype == torch.bfloat16
        move(self.buffer.data_ptr(), layers, rows, kv_heads, tiles, row, first - start, own, *head)

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.starts[target], self.groups[target] = self.starts[source], self.groups[source]
        own = tiles_of(length - self.starts[source])
        self.buffer[:, :, target, :, :own] = self.buffer[:, :, source, :, :own]
