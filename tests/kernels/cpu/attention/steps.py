"""A layer of attention that is fed random projections, and the expected results in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bass_core.model.tiled import TiledCache
from kernels.cpu.attention.layout import padded
from kernels.cpu.attention.step import Attention, attend_alone
from kernels.cpu.attention.tree import Tree
from kernels.cpu.kinds import HAS_DOT
from kernels.plan import AttentionPlan
from kernels.reference.attention import pad
from tests.support.trees import Parents, batch_tree

LENGTH = 1340
# (head dimension, whether products are of bfloat16). Heads of 64 fill AMX tiles if the CPU has them.
LAYERS: dict[str, tuple[int, bool]] = {"float32": (20, False)}
if HAS_DOT:
    LAYERS |= {"bfloat16": (20, True), "bfloat16, heads of 64": (64, True)}


class Layer:
    """A layer of attention, and texts to feed: random projections [texts, LENGTH, (heads + 2 kv_heads) x dim]."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dot: bool, texts: int = 6) -> None:
        self.attention = Attention(heads, kv_heads, dim, dot)
        torch.manual_seed(1)
        self.texts = torch.randn(texts, LENGTH, (heads + 2 * kv_heads) * dim)
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 3, dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)

    def cache(self, rows: int, columns: int = LENGTH, prefix: TiledCache | None = None) -> TiledCache:
        layer, dtype = self.attention, torch.bfloat16 if self.attention.dot else torch.float32
        return TiledCache(1, rows, columns, layer.kv_heads, layer.dim, dtype, prefix=prefix)

    def feed(
        self,
        cache: TiledCache,
        texts: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        window: int | None = None,
    ) -> list[Tensor]:
        """Feed each row b the counts[b] tokens of text texts[b] from lengths[b] on; return the rows' results."""
        spans = zip(texts, lengths, counts, strict=True)
        return self.feed_rows(
            cache, [self.texts[text, a : a + count] for text, a, count in spans], lengths, window
        )

    def feed_rows(
        self,
        cache: TiledCache,
        rows: Sequence[Tensor],
        lengths: Sequence[int],
        window: int | None = None,
        tree: Tree | None = None,
    ) -> list[Tensor]:
        """Feed projections to each row; return the rows' results."""
        skip, counts = None, [len(row) for row in rows]
        if window is not None:
            skip = np.maximum(64, (np.array(lengths) - window) // 64 * 64)
        cos_sin = self.cos_sin.flatten().numpy()
        out = attend_alone(self.attention, torch.cat(list(rows)), lengths, counts, cache, cos_sin, skip, tree=tree)
        return list(out.split(counts))

    def expected(self, text: int, length: int, count: int, window: int | None = None) -> Tensor:
        """Return the results for tokens length .. length + count - 1 of a text, in torch and float32.

        With `dot`, queries, keys and values are rounded to bfloat16 first.
        """
        layer, end = self.attention, length + count
        states = self.texts[text, :end].view(end, -1, layer.dim)
        query, key, value = states.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
        cos, sin = (part.repeat(1, 2)[:end, None] for part in self.cos_sin.chunk(2, 1))

        def rotated(x: Tensor) -> Tensor:
            low, high = x.chunk(2, 2)
            return x * cos + torch.cat((-high, low), 2) * sin

        plan = AttentionPlan(torch.tensor([length]), [length], count, gap=window)
        scale = math.log2(math.e) / layer.dim**0.5
        parts = (rotated(query)[length:] * scale, rotated(key), value)
        if layer.dot:
            parts = tuple(part.bfloat16().float() for part in parts)
        query, key, value = (x.transpose(0, 1)[None] for x in parts)
        result = pad(query, key.contiguous(), value.contiguous(), plan, scaling=math.log(2))
        return result.reshape(count, layer.heads * layer.dim)

    def assert_close(self, result: Tensor, expected: Tensor) -> None:
        """Check equality within rounding of float32 (bfloat16 with `dot`), relative to the largest number."""
        assert result.shape == expected.shape
        error = (result - expected).abs().max() / expected.abs().max()
        assert error < (0.004 if self.attention.dot else 3e-6), error


def fill_with_nan(cache: TiledCache, layer: Layer) -> TiledCache:
    """Fill the keys and values of a cache with NaN. The padding after a head's numbers stays zero."""
    size, width = layer.attention.dim, padded(layer.attention.dim)
    tiles = cache.buffer[0].view(2, -1, 16 * width)
    tiles[0].fill_(torch.nan)
    values = tiles[1].view(-1, *((8, width, 2) if layer.attention.dot else (16, width)))
    (values[:, :, :size] if layer.attention.dot else values[..., :size]).fill_(torch.nan)
    return cache


def flat_tree(trees: Sequence[Parents], lengths: Sequence[int], fed: Sequence[int] | None = None) -> Tree:
    """Return the trees in the kernels' format. The rows' `lengths` include the `fed` tokens of their trees."""
    batch = batch_tree(trees, fed)
    new = [len(tree) - old for tree, old in zip(trees, batch.before, strict=True)]
    sees, depths = (
        [a for row, n in zip(column, new, strict=True) for a in row[:n]] for column in (batch.sees, batch.depths)
    )
    bases = np.array(lengths, np.int64) - np.array(batch.before, np.int64)
    return Tree(bases, np.array(sees, np.int64), np.array(depths, np.int64))
