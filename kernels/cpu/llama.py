"""The packed weights of a Llama-shaped model, and its forward as a torch function.

`PackedLlama.run` computes the logits of a step's tokens and writes their keys and values to the cache;
`PackedLlama.draft` also drafts a chain. Several threads may call them at once, each with separate rows of a cache:
scratch memory is kept per thread. forward.py has the computation.
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
from .chain import NO_CHAIN, Chain, Drafted, can_feed, chain_arguments
from .forward import forward, phases_of
from .kinds import HAS_DOT, PANEL, STEP
from .packing import Packed
from .pages import aligned
from .products import blocks_of, vector_buffers

Array = np.ndarray[Any, Any]


class _Scratch(threading.local):
    """A thread's scratch memory, as large as its largest step so far has needed."""

    tokens, chosen = 0, 0
    floats: Array
    vectors: tuple[Array, Array]
    logits: Array = np.empty(0, np.float32)


@dataclass
class PackedLlama:
    """A packed model.

    Attributes:
        matrices: four per layer, then the output layer, in the order of `forward` (forward.py).
        norms, norm_rows, head_norms, rotated, factor: as in `forward`.
        eps: added to the mean of squares in RMSNorm.
    """

    matrices: list[Packed]
    norms: Array
    norm_rows: Array
    head_norms: Array
    rotated: Array
    factor: float
    eps: float
    heads: int
    kv_heads: int
    dim: int

    def __post_init__(self) -> None:
        self.lines = np.array([matrix.line for matrix in self.matrices], np.int64)
        self._columns, self._last_columns = self.matrices[0].columns, self.matrices[-1].columns
        self.layers, self.hidden = len(self.matrices) // 4, self.norms.shape[1]
        self._vectors = STEP * int(self.lines[:, 3].max())
        self._outputs = PANEL * int(self.lines[:-1, 2].max())
        self.dot = HAS_DOT and self.matrices[0].form != "float16"
        self.attention = Attention(self.heads, self.kv_heads, self.dim, self.dot)
        self._scratch = _Scratch()

    @property
    def nbytes(self) -> int:
        """Return how many bytes of weights a step reads."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def run(
        self,
        x: Tensor,
        firsts: Array,
        lengths: Sequence[int],
        wanted: Array,
        cache: Caches,
        rope: Array,
        gap_ends: Array | None = None,
        read_layers: Sequence[int] = (),
        keep: bool = False,
        tree: Tree | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute a step, and write its keys and values to the cache.

        Args:
            x: float32 [N, hidden], contiguous: the embedded tokens. It is overwritten.
            firsts: int64 [B + 1]; the tokens of row b begin at firsts[b].
            lengths: cached tokens of each row.
            wanted: int64 [M], the tokens whose logits are computed.
            cache: the rows' keys and values.
            rope: float32 [positions x rotated], as in forward.py.
            gap_ends: which columns are hidden (attention/step.py).
            read_layers: the layers before which x is copied.
            keep: whether the logits get fresh memory; otherwise this thread's next call overwrites them.
            tree: the trees that the new tokens form; None if they continue the text.

        Returns:
            Logits float32 [M, V], the final norm [N, hidden], and the copies of x.
        """
        chosen, stream_index = len(wanted), np.full(self.layers + 1, -1, np.int64)
        stream_index[list(read_layers)] = np.arange(len(read_layers))
        buffers = self._buffers(max(x.shape[0], chosen), chosen)
        if keep:
            buffers = *buffers[:3], np.empty_like(buffers[3])
        last_blocks = blocks_of(chosen, self._last_columns)
        step = firsts, np.asarray(lengths, np.int64), self._blocks(x.shape[0]), wanted, last_blocks
        streams = np.empty((len(read_layers), x.numel()), np.float32)
        last = self._forward(
            x,
            step,
            self.attention.arguments(*step[:2], cache, gap_ends, tree),
            rope,
            stream_index,
            streams,
            buffers,
            NO_CHAIN,
            0,
        )
        wanted_logits = buffers[3].reshape(chosen, PANEL * int(self.lines[-1, 2]))[:, : self.matrices[-1].rows]
        copies = streams.reshape(len(read_layers), *x.shape)
        return torch.from_numpy(wanted_logits), last, list(map(torch.from_numpy, copies))

    def draft(
        self, x: Tensor, firsts: Array, lengths: Sequence[int], cache: Caches, rope: Array, chain: Chain
    ) -> tuple[Tensor, Drafted]:
        """Compute a step, then draft a chain.

        Other arguments are those of `run`; every row has at least one token.

        Returns:
            Logits float32 [levels, B, V'] after each row's newest token, then after each draft but the last; and
            the drafts. Logits of levels that no row reaches are undefined. Without chain.keep there are only the
            logits of the last level that was reached.
        """
        rows, before = len(chain.most), np.asarray(lengths, np.int64)
        buffers = self._buffers(x.shape[0], 0)
        step = firsts, before, self._blocks(x.shape[0]), firsts[1:] - 1, self._blocks(rows)
        width = PANEL * int(self.lines[-1, 2])
        kept_levels = chain.levels if chain.keep else 1
        logits = np.empty(kept_levels * rows * width, np.float32)
        stream_index, streams = np.full(self.layers + 1, -1, np.int64), np.empty((0, x.numel()), np.float32)
        after = before + np.diff(firsts)
        plans, segments = self.attention.later(after, chain.levels - 1, cache)
        attention = self.attention.arguments(*step[:2], cache, None, segments=segments)
        chain_args, drafted = chain_arguments(chain, after, self.hidden, plans, self._blocks(rows))
        self._forward(
            x, step, attention, rope, stream_index, streams, (*buffers[:3], logits), chain_args, chain.levels
        )
        level_logits = torch.from_numpy(logits).view(kept_levels, rows, width)[..., : self.matrices[-1].rows]
        return level_logits, drafted

    def can_draft(self, fuse: Packed) -> bool:
        """Return whether this layer's vectors and results have the layout that `draft` needs."""
        return can_feed(fuse, self.hidden, self._vectors) and fuse.columns >= self._columns <= self._last_columns

    def _blocks(self, vectors: int) -> Array:
        return blocks_of(vectors, self._columns)

    def _forward(
        self,
        x: Tensor,
        step: tuple[Array, ...],
        attention: tuple[Any, ...],
        rope: Array,
        stream_index: Array,
        streams: Array,
        buffers: tuple[Array, ...],
        chain: tuple[Any, ...],
        levels: int,
    ) -> Tensor:
        """Call the kernel; return the final norm [N, hidden]."""
        shape, visible, plan, caches, segment_of, queries, parts = attention
        scratch, vectors_u16, vectors_f32, logits = buffers
        last = np.empty(tuple(x.shape), np.float32)
        pool.run(
            forward, phases_of(self.layers, levels), self.lines, self.norms, self.norm_rows, self.head_norms,
            self.rotated, np.float32(self.eps), np.float32(self.factor), shape, step, visible, plan, caches,
            segment_of, rope, x.view(x.numel()).numpy(), stream_index, streams, scratch, vectors_u16, vectors_f32,
            queries, parts, self.dot, last.ravel(), logits, chain,
        )  # fmt: skip
        return torch.from_numpy(last)

    def _buffers(self, tokens: int, chosen: int) -> tuple[Array, ...]:
        """Return scratch for `tokens` tokens and `chosen` rows of logits.

        It consists of float32 numbers, vectors as uint16 and as float32, and logits.
        """
        scratch, outputs = self._scratch, PANEL * int(self.lines[-1, 2])
        token_numbers = self.heads * self.dim + max(self._outputs, self.hidden)
        if scratch.tokens < tokens:
            scratch.tokens, scratch.floats = tokens, aligned(4 * (tokens * token_numbers + 16)).view(np.float32)
            scratch.vectors = vector_buffers(2 * tokens * self._vectors)
        if scratch.chosen < chosen:
            scratch.chosen, scratch.logits = chosen, aligned(4 * chosen * outputs).view(np.float32)
        vectors_u16, vectors_f32 = scratch.vectors
        size = 2 * tokens * self._vectors
        return (
            scratch.floats[: tokens * token_numbers + 16],
            vectors_u16[: 2 * size],
            vectors_f32[:size],
            scratch.logits[: chosen * outputs],
        )
