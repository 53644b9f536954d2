"""A Llama-shaped model's packed weights, and its forward as a torch function.

Contract: `PackedLlama.run` computes the logits of a step's tokens and writes their keys and values to the cache.
It may be called by several threads at once, each with its own rows of a cache. Scratch memory is kept for each
thread. What it computes, and how: forward.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attention.step import Attention, Caches
from .attention.tree import Tree
from .calls import pool
from .chain import NO_CHAIN, Chain, Drafted, arguments, fits
from .forward import forward, phases_of
from .kinds import HAS_DOT, PANEL, STEP
from .packing import Packed
from .pages import aligned
from .products import blocks_of, scratch

Array = np.ndarray[Any, Any]


class _Room(threading.local):
    """Scratch of a thread, as large as its largest step so far."""

    tokens, chosen = 0, 0
    floats: Array
    vectors: tuple[Array, Array]
    logits: Array = np.empty(0, np.float32)


@dataclass
class PackedLlama:
    """matrices: four a layer, then the output layer, as forward.py names them. norms float32 [2 layers + 1,
    hidden]; head_norms float32 [layers, 2, dim], flat, or empty; eps: what RMSNorm adds to the mean of squares."""

    matrices: list[Packed]
    norms: Array
    head_norms: Array
    eps: float
    heads: int
    kv_heads: int
    dim: int

    def __post_init__(self) -> None:
        self.lines = np.array([one.line() for one in self.matrices], np.int64)
        self._columns, self._last_columns = self.matrices[0].columns, self.matrices[-1].columns
        self.layers, self.hidden = len(self.matrices) // 4, self.norms.shape[1]
        self._vectors = STEP * int(self.lines[:, 3].max())
        self._outputs = PANEL * int(self.lines[:-1, 2].max())
        self.dot = HAS_DOT and self.matrices[0].form != "float16"
        self.attention = Attention(self.heads, self.kv_heads, self.dim, self.dot)
        self._room = _Room()

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(one.nbytes for one in self.matrices)

    def run(
        self,
        x: Tensor,
        firsts: Array,
        lengths: Sequence[int],
        wanted: Array,
        cache: Caches,
        turns: Array,
        skip: Array | None = None,
        reads: Sequence[int] = (),
        keep: bool = False,
        tree: Tree | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits float32 [M, V] of the tokens `wanted` int64 [M]; the final norm [N, hidden]; the kept streams.

        x [N, hidden], float32 and contiguous, which is overwritten: the embedded tokens, those of row b from
        firsts[b] (int64 [B + 1]) on, after lengths[b] cached ones. turns float32 [positions x dim]: forward.py.
        skip: which columns are not seen (attention/step.py). reads: before which layers x is kept. Without `keep`
        the logits are overwritten by this thread's next call. tree: what the new tokens form, None for texts.
        """
        chosen, kept = len(wanted), np.full(self.layers + 1, -1, np.int64)
        kept[list(reads)] = np.arange(len(reads))
        room = self._arrays(max(x.shape[0], chosen), chosen)
        if keep:
            room = *room[:3], np.empty_like(room[3])
        last_blocks = blocks_of(chosen, self._last_columns)
        step = firsts, np.asarray(lengths, np.int64), self._blocks(x.shape[0]), wanted, last_blocks
        streams = np.empty((len(reads), x.numel()), np.float32)
        last = self._forward(
            x,
            step,
            self.attention.arguments(*step[:2], cache, skip, tree),
            turns,
            kept,
            streams,
            room,
            NO_CHAIN,
            0,
        )
        made = torch.from_numpy(room[3]).view(chosen, PANEL * int(self.lines[-1, 2]))[:, : self.matrices[-1].rows]
        return made, last, list(torch.from_numpy(streams).view(len(reads), *x.shape))

    def draft(
        self, x: Tensor, firsts: Array, lengths: Sequence[int], cache: Caches, turns: Array, chain: Chain
    ) -> tuple[Tensor, Drafted]:
        """Logits float32 [levels, B, V'] of each row's newest token, then of its drafts but the last; the drafts.

        Arguments as for `run`, of which every row has a token or more. Levels that no row reaches hold anything.
        Without chain.keep there is one level, the last one that was reached.
        """
        rows, before = len(chain.most), np.asarray(lengths, np.int64)
        room = self._arrays(x.shape[0], 0)
        step = firsts, before, self._blocks(x.shape[0]), firsts[1:] - 1, self._blocks(rows)
        width = PANEL * int(self.lines[-1, 2])
        kept_levels = chain.levels if chain.keep else 1
        logits = np.empty(kept_levels * rows * width, np.float32)
        kept, streams = np.full(self.layers + 1, -1, np.int64), np.empty((0, x.numel()), np.float32)
        after = before + np.diff(firsts)
        plans, segments = self.attention.later(after, chain.levels - 1, cache)
        attention = self.attention.arguments(*step[:2], cache, None, segments=segments)
        given, drafted = arguments(chain, after, self.hidden, plans, self._blocks(rows))
        self._forward(x, step, attention, turns, kept, streams, (*room[:3], logits), given, chain.levels)
        made = torch.from_numpy(logits).view(kept_levels, rows, width)[..., : self.matrices[-1].rows]
        return made, drafted

    def can_draft(self, fuse: Packed) -> bool:
        """Whether this layer's vectors and results lie as `draft` needs them."""
        return fits(fuse, self.hidden, self._vectors) and fuse.columns >= self._columns <= self._last_columns

    def _blocks(self, vectors: int) -> Array:
        return blocks_of(vectors, self._columns)

    def _forward(
        self,
        x: Tensor,
        step: tuple[Array, ...],
        attention: tuple[Any, ...],
        turns: Array,
        kept: Array,
        streams: Array,
        room: tuple[Array, ...],
        chain: tuple[Any, ...],
        levels: int,
    ) -> Tensor:
        """Call the kernel; returns the final norm [N, hidden]."""
        shape, sight, plan, caches, segment, queries, parts = attention
        floats, short, wide, logits = room
        last = np.empty(tuple(x.shape), np.float32)
        pool.run(
            forward, phases_of(self.layers, levels), self.lines, self.norms, self.head_norms, np.float32(self.eps),
            shape, step, sight, plan, caches, segment, turns, x.view(x.numel()).numpy(), kept, streams, floats,
            short, wide, queries, parts, self.dot, last.ravel(), logits, chain,
        )  # fmt: skip
        return torch.from_numpy(last)

    def _arrays(self, tokens: int, chosen: int) -> tuple[Array, ...]:
        """Scratch for so many tokens and rows of logits: float32, vectors as uint16 and as float32, logits."""
        own, outputs = self._room, PANEL * int(self.lines[-1, 2])
        each = self.heads * self.dim + max(self._outputs, self.hidden)
        if own.tokens < tokens:
            own.tokens, own.floats = tokens, aligned(4 * (tokens * each + 16)).view(np.float32)
            own.vectors = scratch(2 * tokens * self._vectors)
        if own.chosen < chosen:
            own.chosen, own.logits = chosen, aligned(4 * chosen * outputs).view(np.float32)
        short, wide = own.vectors
        size = 2 * tokens * self._vectors
        return own.floats[: tokens * each + 16], short[: 2 * size], wide[:size], own.logits[: chosen * outputs]
