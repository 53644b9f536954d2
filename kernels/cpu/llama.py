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

from . import pool
from .forward import forward, phases_of
from .kinds import ROWS, STEP
from .packing import Packed
from .products import blocks_of, scratch

Array = np.ndarray[Any, Any]


class _Room(threading.local):
    """Scratch of the thread's last step: which step, and its arrays."""

    key: tuple[int, int, int] | None = None
    arrays: tuple[Array, ...] = ()


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
        cache: Tensor,
        turns: Array,
        reads: Sequence[int] = (),
        keep: bool = False,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits float32 [M, V] of the tokens `wanted` int64 [M]; the final norm [N, hidden]; the kept streams.

        x [N, hidden], float32 and contiguous, which is overwritten: the embedded tokens, those of row b from
        firsts[b] (int64 [B + 1]) on, behind lengths[b] cached ones. cache float32 [layers, 2, rows, key-value
        heads, columns, dim]; turns float32 [positions x dim]: forward.py. reads: before which layers x is kept.
        Without `keep` the logits are overwritten by this thread's next call.
        """
        tokens, chosen = len(x), len(wanted)
        room, short, wide, logits = self._arrays(tokens, chosen)
        logits = np.empty_like(logits) if keep else logits
        kept = np.full(self.layers + 1, -1, np.int64)
        kept[list(reads)] = np.arange(len(reads))
        streams = np.empty((len(reads), tokens * self.hidden), np.float32)
        last = np.empty((tokens, self.hidden), np.float32)
        starts = blocks_of(tokens)
        step = (
            firsts,
            np.asarray(lengths, np.int64),
            starts,
            wanted,
            starts if chosen == tokens else blocks_of(chosen),
        )
        shape = (self.heads, self.kv_heads, self.dim, cache.shape[2], cache.shape[4])
        pool.run(
            forward, phases_of(self.layers), self.lines, self.norms, self.head_norms, np.float32(self.eps), shape,
            step, cache.view(-1).numpy(), turns, x.view(-1).numpy(), kept, streams, room, short, wide,
            last.ravel(), logits,
        )  # fmt: skip
        made = torch.from_numpy(logits).view(chosen, -1)[:, : self.matrices[-1].rows]
        return made, torch.from_numpy(last), [torch.from_numpy(one).view(tokens, -1) for one in streams]

    def _arrays(self, tokens: int, chosen: int) -> tuple[Array, ...]:
        """Scratch for so many tokens and so many logits' rows: float32, packed uint16 or float32, logits."""
        own, key = self._room, (id(self), tokens, chosen)
        if own.key != key:
            sizes = tokens * (self.heads * self.dim + max(self._outputs, self.hidden))
            vectors = scratch(2 * tokens * self._vectors, self.matrices[0].dot)
            logits = np.empty(chosen * ROWS * int(self.lines[-1, 2]), np.float32)
            own.key, own.arrays = key, (np.empty(sizes, np.float32), *vectors, logits)
        return own.arrays
