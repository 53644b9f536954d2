"""A captured step: the buffers that it reads, how they are filled before a replay, and what it writes.

Contract: a step serves every batch of at most its rows and tokens. A batch's numbers go to the device in one copy,
or in two where its tokens form trees, and nothing waits for it. The rows and tokens that a step has more than a
batch are padding: such a row has length 0, and a padding token of a tree sees itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.plan import MOST_TREE, TokenTree

from ..machine.transfer import to_device
from .cache import RaggedCache
from .forward import BatchTree, CapturedBatch, ForwardBatch, ForwardOutput, token_tree


@dataclass
class StaticStep:
    """A captured step of one shape: the buffers it reads, the function that replays it, and its output buffers.

    taken: bytes by which the pool grew when the step was captured. They include intermediate results only where
    these needed more memory than those of earlier steps.
    """

    batch: CapturedBatch
    output: ForwardOutput
    replay: Callable[[], Any]
    taken: int = 0

    @property
    def nbytes(self) -> int:
        return max(self.taken, sum(tensor.nbytes for tensor in tensors(self.output)))


@dataclass
class StepInputs:
    """A batch's numbers in the shape of a step, on its device.

    numbers: int64 [1, rows], its lengths, or [3, rows], with its rows' starts and groups.
    """

    numbers: Tensor
    tree: TokenTree | None

    @classmethod
    def of(cls, batch: ForwardBatch, cache: RaggedCache, rows: int, columns: int) -> StepInputs:
        """Those of a batch of at most `rows` rows of at most `columns` tokens."""
        device, count = batch.tokens.device, len(batch.lengths)
        host = [batch.lengths] + ([] if cache.prefix is None else [cache.starts, cache.groups])
        placed = to_device([[*numbers[:count]] + [0] * (rows - count) for numbers in host], device)
        tree = None if batch.tree is None else token_tree(_widened(batch.tree, rows, columns), device)
        return cls(placed, tree)

    def buffers(self, batch: ForwardBatch, columns: int, extent: int) -> CapturedBatch:
        """New buffers for a step of `columns` tokens a row, filled with the batch."""
        tokens = batch.tokens
        lengths, *shared = (numbers.clone() for numbers in self.numbers)
        rows = len(lengths)
        static = torch.zeros(rows, columns, *tokens.shape[2:], dtype=tokens.dtype, device=tokens.device)
        static[: tokens.shape[0], : tokens.shape[1]] = tokens
        both = (shared[0], shared[1]) if shared else None
        tree = None
        if self.tree is not None:
            tree = TokenTree(*(one.clone(memory_format=torch.contiguous_format) for one in _parts(self.tree)))
        return CapturedBatch(static, lengths, extent, batch.return_states, both, batch.window, tree)

    def fill(self, buffers: CapturedBatch, tokens: Tensor) -> None:
        """Write the batch, whose tokens are `tokens`, to a step's buffers."""
        buffers.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
        for static, numbers in zip((buffers.lengths, *(buffers.shared or ())), self.numbers, strict=True):
            static.copy_(numbers)
        if self.tree is not None and buffers.tree is not None:
            for static, fresh in zip(_parts(buffers.tree), _parts(self.tree), strict=True):
                static.copy_(fresh)


def fits_tree(tree: BatchTree | None, columns: int) -> bool:
    """Whether each padding token of a step with so many columns has a bit of its own."""
    return tree is None or max(tree.before) + columns <= MOST_TREE


def _widened(tree: BatchTree, rows: int, columns: int) -> BatchTree:
    """The tree with padding rows and padding tokens."""
    before = [*tree.before, *[0] * (rows - len(tree.before))]
    sees = [*tree.sees, *([] for _ in range(rows - len(tree.sees)))]
    depths = [*tree.depths, *([] for _ in range(rows - len(tree.depths)))]
    return BatchTree(
        [
            row + [1 << first + column for column in range(len(row), columns)]
            for row, first in zip(sees, before, strict=True)
        ],
        [row + [0] * (columns - len(row)) for row in depths],
        before,
    )


def _parts(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    return tree.sees, tree.depths, tree.before


def tensors(output: ForwardOutput) -> list[Tensor]:
    """The buffers that a step writes."""
    return [output.logits] if output.states is None else [output.logits, output.states]
