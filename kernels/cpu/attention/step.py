"""What attention needs in one step: its plan, its caches' addresses, and scratch.

Contract: `Attention.arguments` prepares a step for the phases (phases.py), once for all of its layers. It may be
called by several threads at once; scratch memory is kept for each thread. `attend_alone` runs the phases
in a call of their own.
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
from ..products import blocks_of, scratch
from .compiled import segment_for
from .layout import padded
from .phases import alone
from .plan import planned
from .tree import NO_TREE, Tree

Array = np.ndarray[Any, Any]


class Caches(Protocol):
    """Keys and values of a step's rows (bass_core/model/tiled.py).

    buffer [layers, 2, rows, key-value heads, tiles, 16 x padded]: bfloat16 for products of bfloat16, else float32.
    starts, groups [rows]: how many tokens of a row are those of a prefix, and of which.
    """

    buffer: Tensor
    starts: list[int]
    groups: list[int]

    @property
    def prefix(self) -> Any:
        """The same for what rows share, or None."""


class _Room(threading.local):
    """Scratch of a thread, as large as its largest step so far: queries, kept segments."""

    tokens, kept = -1, -1
    queries: tuple[Array, Array]
    parts: Array


@dataclass
class Attention:
    """Attention of so many heads; dot: whether keys, values, queries and weights are bfloat16."""

    heads: int
    kv_heads: int
    dim: int
    dot: bool

    def __post_init__(self) -> None:
        self._size, self._segment, self._room = padded(self.dim), segment_for(self.dim, self.dot), _Room()

    def arguments(
        self,
        firsts: Array,
        lengths: Array,
        cache: Caches,
        skip: Array | None,
        tree: Tree | None = None,
        segments: int = 0,
    ) -> tuple[Any, ...]:
        """shape, sight, plan, caches, the compiled `segment`, queries, parts: the arguments of the phases.

        firsts int64 [B + 1], lengths int64 [B]: the new tokens of row b are those from firsts[b] on, after
        lengths[b] cached ones. skip int64 [B]: columns 64 to skip[b] - 1, a multiple of 64, are not seen; None:
        all are. tree: what the new tokens form, None for texts. segments: for so many kept ones there is scratch.
        Overwritten by this thread's next call.
        """
        tokens, size, tree = int(firsts[-1]), self._size, NO_TREE if tree is None else tree
        sight = _sight(cache, len(lengths), skip)
        items, table, order, kept = self._planned(firsts, lengths, sight, tree)
        own, each, kept = self._room, self.heads * (size + 2), max(kept, segments)
        if own.tokens < tokens:
            own.tokens, own.queries = tokens, scratch(tokens * self.heads * size)
        if own.kept < kept:
            own.kept, own.parts = kept, aligned(4 * kept * each).view(np.float32)
        sums = kept * self.heads * size
        parts = own.parts[:sums], own.parts[sums : kept * each]
        caches = np.array([*_place(cache), *((0, 0, 0) if cache.prefix is None else _place(cache.prefix))])
        shape = self.heads, self.kv_heads, self.dim, size
        return shape, sight, (items, table, order, *tree[:2]), caches, self._segment, own.queries, parts

    def later(self, lengths: Array, steps: int, cache: Caches) -> tuple[list[tuple[Array, ...]], int]:
        """The plans of so many further steps of one token a row, and the most segments that one keeps."""
        rows = len(lengths)
        sight, firsts = _sight(cache, rows, None), np.arange(rows + 1)
        made = [self._planned(firsts, lengths + step, sight, NO_TREE) for step in range(steps)]
        return [plan[:3] for plan in made], max((plan[3] for plan in made), default=0)

    def _planned(self, firsts: Array, lengths: Array, sight: tuple[Array, ...], tree: Tree) -> tuple[Any, ...]:
        group, threads = self.heads // self.kv_heads, torch.get_num_threads()
        given: tuple[Any, ...] = (*sight, *tree, group, self.kv_heads, threads)
        made: tuple[Any, ...] = planned(firsts, lengths, *given)
        return made


def _sight(cache: Caches, rows: int, skip: Array | None) -> tuple[Array, ...]:
    shared = np.array((cache.starts[:rows], cache.groups[:rows]), np.int64)
    return shared[0], shared[1], np.zeros(rows, np.int64) if skip is None else skip


def _place(cache: Caches) -> tuple[int, int, int]:
    """The address of a cache's tiles, its rows, and the tiles of a row."""
    return cache.buffer.data_ptr(), cache.buffer.shape[2], cache.buffer.shape[4]


def attend_alone(
    attention: Attention,
    y: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    cache: Caches,
    turns: Array,
    skip: Array | None = None,
    layers: int = 1,
    tree: Tree | None = None,
) -> Tensor:
    """The attention of a model's first layer: means of the values float32 [N, heads x dim].

    y float32 [N, (heads + 2 x key-value heads) x dim]: queries, keys and values of counts[b] tokens of each row b,
    after lengths[b] cached ones. It is rotated in place; keys and values are written to the cache. turns float32
    [positions x dim], flat: of each position its cosines, then its sines. layers: how many layers to compute, one
    after another and each from y, to measure them; the last one's means are returned. tree: see `arguments`.
    """
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    step = firsts, np.asarray(lengths, np.int64), blocks_of(len(y), 8)
    inputs = attention.heads * attention.dim
    out = np.empty((len(y), inputs), np.float32)
    vectors = scratch(len(y) * (inputs + STEP - 1))
    arguments = attention.arguments(firsts, step[1], cache, skip, tree)
    pool.run(
        alone, 3 * layers, layers, y.numpy().ravel(), step, *arguments, attention.dot, turns,
        np.empty(0, np.float32), out.ravel(), *vectors,
    )  # fmt: skip
    return torch.from_numpy(out)
