"""A key-value cache in tiles, for the compiled forward on a CPU (model/llama_cpu.py).

It is a RaggedCache with another layout (kernels/cpu/attention/layout.py): `buffer` is [layers, 2, max_batch,
kv_heads, tiles, TILE x padded head_dim] in bfloat16 or float32. The forward reads and writes the buffer directly,
so this cache makes no plans.
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
    """Keys and values in tiles. Columns of a row's last tile after max_len stay unused."""

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
        columns = np.array(sources, np.int64) - start
        head_format = self.head_dim, padded(self.head_dim), self.buffer.dtype == torch.bfloat16
        move(self.buffer.data_ptr(), layers, rows, kv_heads, tiles, row, first - start, columns, *head_format)

    def keep_all(self, moves: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        for move in moves:
            self.keep(*move)

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.starts[target], self.groups[target] = self.starts[source], self.groups[source]
        own_tiles = tiles_of(length - self.starts[source])
        self.buffer[:, :, target, :, :own_tiles] = self.buffer[:, :, source, :, :own_tiles]
