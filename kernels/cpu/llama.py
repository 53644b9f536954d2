"""A Llama-shaped model's packed weights, and its forward as a torch function.

Contract: `PackedLlama.run` computes the logits of a step's tokens and writes their keys and values to the cache.
It may be called by several threads at once, each with its own rows of a cache. Scratch memory is kept for each
thread. What it computes, and how: forward.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .attention.compiled import address_of_segment
from .attention.layout import padded
from .attention.plan import planned
from .calls import pool
from .forward import forward, phases_of
from .kinds import ROWS, STEP
from .packing import Packed, aligned
from .products import blocks_of, scratch

Array = np.ndarray[Any, Any]


class _Room(threading.local):
    """Scratch of a thread, as large as its largest step so far."""

    tokens, chosen, kept = 0, 0, 0
    floats: Array
    vectors: tuple[Array, Array]
    queries: tuple[Array, Array]
    parts: Array
    logits: Array


class Caches(Protocol):
    """Keys and values of a step's rows (bass_core/attention/tiled.py).

    buffer [layers, 2, rows, key-value heads, tiles, 16 x padded]: bfloat16 for products of bfloat16, else float32.
    prefix: the same of what rows share, or None. starts, groups: int64 [rows], how many tokens of a row are those of
    a prefix, and of which.
    """

    buffer: Tensor
    starts: Any
    groups: Any

    @property
    def prefix(self) -> Any: ...


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
        self.layers, self.hidden = len(self.matrices) // 4, self.norms.shape[1]
        self._vectors = STEP * int(self.lines[:, 3].max())
        self._outputs = ROWS * int(self.lines[:-1, 2].max())
        self.dot, self._padded = bool(self.lines[0, 7]), padded(self.dim)
        self._segment = address_of_segment(self.dot)
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
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits float32 [M, V] of the tokens `wanted` int64 [M]; the final norm [N, hidden]; the kept streams.

        x [N, hidden], float32 and contiguous, which is overwritten: the embedded tokens, those of row b from
        firsts[b] (int64 [B + 1]) on, behind lengths[b] cached ones. turns float32 [positions x dim]: forward.py. skip
        int64 [B]: columns 64 to skip[b] - 1 of row b are not seen, a multiple of 64; None: all are. reads: before
        which layers x is kept. Without `keep` the logits are overwritten by this thread's next call.
        """
        tokens, chosen = x.shape[0], len(wanted)
        room, short, wide, logits = self._arrays(max(tokens, chosen), chosen)
        logits = np.empty_like(logits) if keep else logits
        kept = np.full(self.layers + 1, -1, np.int64)
        kept[list(reads)] = np.arange(len(reads))
        streams = np.empty((len(reads), tokens * self.hidden), np.float32)
        last = np.empty((tokens, self.hidden), np.float32)
        starts = blocks_of(tokens)
        rows = len(lengths)
        step = (
            firsts,
            np.asarray(lengths, np.int64),
            starts,
            wanted,
            starts if chosen == tokens else blocks_of(chosen),
        )
        sight = cache.starts[:rows], cache.groups[:rows], np.zeros(rows, np.int64) if skip is None else skip
        group = self.heads // self.kv_heads
        *plan, kept_segments = planned(*step[:2], *sight, group, self.kv_heads, torch.get_num_threads())
        queries, parts = self._attending(tokens, kept_segments)
        caches = np.array([*_sizes(cache), *(_sizes(cache.prefix) if cache.prefix is not None else (0, 0, 0))])
        pool.run(
            forward, phases_of(self.layers), self.lines, self.norms, self.head_norms, np.float32(self.eps),
            (self.heads, self.kv_heads, self.dim, self._padded), step, sight, tuple(plan), caches, self._segment,
            turns, x.view(tokens * self.hidden).numpy(), kept, streams, room, short, wide, queries, parts,
            last.ravel(), logits,
        )  # fmt: skip
        made = torch.from_numpy(logits).view(chosen, ROWS * int(self.lines[-1, 2]))[:, : self.matrices[-1].rows]
        return made, torch.from_numpy(last), list(torch.from_numpy(streams).view(len(reads), tokens, self.hidden))

    def _arrays(self, tokens: int, chosen: int) -> tuple[Array, ...]:
        """Scratch for so many tokens and so many rows of logits: float32, packed uint16 or float32, logits."""
        own, outputs = self._room, ROWS * int(self.lines[-1, 2])
        each = self.heads * self.dim + max(self._outputs, self.hidden)
        if own.tokens < tokens:
            own.tokens, own.floats = tokens, np.empty(tokens * each, np.float32)
            own.vectors = scratch(2 * tokens * self._vectors, self.dot)
            own.queries = scratch(tokens * self.heads * self._padded, self.dot)
        if own.chosen < chosen:
            own.chosen, own.logits = chosen, np.empty(chosen * outputs, np.float32)
        vectors = [one[: 2 * tokens * self._vectors] for one in own.vectors]
        return own.floats[: tokens * each], *vectors, own.logits[: chosen * outputs]

    def _attending(self, tokens: int, kept: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Scratch of attention: the queries, and results of so many kept segments. Call `_arrays` before."""
        own, each = self._room, self.heads * (self._padded + 2)
        if own.kept < kept or not hasattr(own, "parts"):
            own.kept, own.parts = kept, aligned(4 * kept * each).view(np.float32)
        sums = kept * self.heads * self._padded
        return own.queries, (own.parts[:sums], own.parts[sums : kept * each])


def _sizes(cache: Caches) -> tuple[int, int, int]:
    """The address of a cache's tiles, its rows, and the tiles of a row."""
    return cache.buffer.data_ptr(), cache.buffer.shape[2], cache.buffer.shape[4]
