"""What attention needs in one step: its plan, the addresses of its caches, and scratch.

`Attention.arguments` prepares a step for the phases (phases.py), once for all of its layers. Several threads may
call it at once; scratch memory is kept per thread. `attend_alone` runs the phases in a separate call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..calls import pool
from ..kinds import STEP
from ..pages import aligned
from ..products import blocks_of, vector_buffers
from .compiled import segment_for
from .layout import padded
from .phases import attend_layers
from .plan import planned
from .tree import NO_TREE, Tree

Array = np.ndarray[Any, Any]


class Caches(Protocol):
    """Keys and values of a step's rows (bass_core/model/tiled.py).

    Attributes:
        buffer: [layers, 2, rows, key-value heads, tiles, 16 x padded], bfloat16 for native products of bfloat16,
            otherwise float32.
        starts: [rows], how many tokens of each row are in its prefix.
        groups: [rows], the prefix of each row.
    """

    buffer: Tensor
    starts: list[int]
    groups: list[int]

    @property
    def prefix(self) -> Any:
        """Return the cache of shared prefixes, or None."""


class _Scratch(threading.local):
    """A thread's scratch memory for queries and kept segments, as large as its largest step so far has needed."""

    tokens, num_kept = -1, -1
    queries: tuple[Array, Array]
    parts: Array


@dataclass
class Attention:
    """Attention of a model's heads; dot: whether keys, values, queries and weights are bfloat16."""

    heads: int
    kv_heads: int
    dim: int
    dot: bool

    def __post_init__(self) -> None:
        self._size, self._segment, self._scratch = padded(self.dim), segment_for(self.dim, self.dot), _Scratch()

    def arguments(
        self,
        firsts: Array,
        lengths: Array,
        cache: Caches,
        gap_ends: Array | None,
        tree: Tree | None = None,
        segments: int = 0,
    ) -> tuple[Any, ...]:
        """Return the arguments of the phases, which this thread's next call overwrites.

        Args:
            firsts: int64 [B + 1]; the new tokens of row b begin at firsts[b].
            lengths: int64 [B], cached tokens of each row.
            gap_ends: int64 [B], multiples of 64; columns 64 to gap_ends[b] - 1 are hidden. None: no columns are
                hidden.
            tree: the trees that the new tokens form; None if they continue the text.
            segments: scratch memory gets space for at least this many kept segments.

        Returns:
            shape, visible, plan, caches, the compiled `segment`, queries, parts.
        """
        tokens, size, tree = int(firsts[-1]), self._size, NO_TREE if tree is None else tree
        visible = _visible(cache, len(lengths), gap_ends)
        items, table, order, num_kept = self._planned(firsts, lengths, visible, tree)
        scratch, part_numbers, num_kept = self._scratch, self.heads * (size + 2), max(num_kept, segments)
        if scratch.tokens < tokens:
            scratch.tokens, scratch.queries = tokens, vector_buffers(tokens * self.heads * size)
        if scratch.num_kept < num_kept:
            scratch.num_kept, scratch.parts = num_kept, aligned(4 * num_kept * part_numbers).view(np.float32)
        sums = num_kept * self.heads * size
        parts = scratch.parts[:sums], scratch.parts[sums : num_kept * part_numbers]
        caches = np.array([*_address(cache), *((0, 0, 0) if cache.prefix is None else _address(cache.prefix))])
        shape = self.heads, self.kv_heads, self.dim, size
        return shape, visible, (items, table, order, *tree[:2]), caches, self._segment, scratch.queries, parts

    def later(self, lengths: Array, steps: int, cache: Caches) -> tuple[list[tuple[Array, ...]], int]:
        """Return plans for `steps` further steps of one token per row, and the largest number of kept segments."""
        rows = len(lengths)
        visible, firsts = _visible(cache, rows, None), np.arange(rows + 1)
        plans = [self._planned(firsts, lengths + step, visible, NO_TREE) for step in range(steps)]
        return [plan[:3] for plan in plans], max((plan[3] for plan in plans), default=0)

    def _planned(self, firsts: Array, lengths: Array, visible: tuple[Array, ...], tree: Tree) -> tuple[Any, ...]:
        group, threads = self.heads // self.kv_heads, torch.get_num_threads()
        options: tuple[Any, ...] = (*visible, *tree, group, self.kv_heads, threads)
        plan: tuple[Any, ...] = planned(firsts, lengths, *options)
        return plan


def _visible(cache: Caches, rows: int, gap_ends: Array | None) -> tuple[Array, ...]:
    shared = np.array((cache.starts[:rows], cache.groups[:rows]), np.int64)
    return shared[0], shared[1], np.zeros(rows, np.int64) if gap_ends is None else gap_ends


def _address(cache: Caches) -> tuple[int, int, int]:
    """Return the address of a cache's tiles, the number of its rows, and the number of tiles per row."""
    return cache.buffer.data_ptr(), cache.buffer.shape[2], cache.buffer.shape[4]


def attend_alone(
    attention: Attention,
    y: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    cache: Caches,
    rope: Array,
    gap_ends: Array | None = None,
    layers: int = 1,
    tree: Tree | None = None,
) -> Tensor:
    """Return the attention of a model's first layer: means of the values float32 [N, heads x dim].

    Keys and values are written to the cache. gap_ends, tree: see `Attention.arguments`.

    Args:
        y: float32 [N, (heads + 2 x key-value heads) x dim], queries, keys and values of the new tokens, row after
            row. It is rotated in place.
        lengths, counts: cached and new tokens of each row.
        rope: float32 [positions x dim], flat: cosines, then sines of each position.
        layers: how many layers to compute, for measurements; each one starts from y. The means of the last layer
            are returned.
    """
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    step = firsts, np.asarray(lengths, np.int64), blocks_of(len(y), 8)
    inputs = attention.heads * attention.dim
    out = np.empty((len(y), inputs), np.float32)
    vectors = vector_buffers(len(y) * (inputs + STEP - 1))
    arguments = attention.arguments(firsts, step[1], cache, gap_ends, tree)
    pool.run(
        attend_layers, 3 * layers, layers, y.numpy().ravel(), step, *arguments, attention.dot, rope,
        np.empty(0, np.float32), out.ravel(), *vectors,
    )  # fmt: skip
    return torch.from_numpy(out)
