"""A captured step: its input buffers, how to fill them before a replay, and its outputs.

A step serves every batch with at most its rows and columns. A batch's numbers go to the device in one copy, or in
two if its tokens form trees. Nothing waits for the copies. Surplus rows and columns are padding: such a row has
length 0, and a padding token of a tree sees only itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.plan import MAX_TREE_TOKENS, TokenTree

from ..machine.transfer import to_device
from .cache import RaggedCache
from .forward import BatchTree, CapturedBatch, ForwardBatch, ForwardOutput, token_tree


@dataclass
class StaticStep:
    """A captured step of one shape.

    Attributes:
        batch: the buffers that it reads.
        output: the buffers that it writes.
        replay: runs the step again.
        taken: bytes by which the pool grew during the capture. They include intermediate results only if this
            step's need more memory than those of earlier steps.
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
    """A batch's numbers, padded to a step's shape and copied to its device.

    Attributes:
        numbers: int64 [1, rows], the lengths; or [3, rows], with the rows' starts and groups.
        tree: the padded trees, or None.
    """

    numbers: Tensor
    tree: TokenTree | None

    @classmethod
    def of(cls, batch: ForwardBatch, cache: RaggedCache, rows: int, columns: int) -> StepInputs:
        """Pad a batch of at most `rows` rows of at most `columns` tokens."""
        device, count = batch.tokens.device, len(batch.lengths)
        host = [batch.lengths] + ([] if cache.prefix is None else [cache.starts, cache.groups])
        placed = to_device([[*numbers[:count]] + [0] * (rows - count) for numbers in host], device)
        tree = None if batch.tree is None else token_tree(_pad_tree(batch.tree, rows, columns), device)
        return cls(placed, tree)

    def buffers(self, batch: ForwardBatch, columns: int, extent: int) -> CapturedBatch:
        """Make buffers for a step of `columns` tokens per row, filled with the batch."""
        tokens = batch.tokens
        lengths, *shared = (numbers.clone() for numbers in self.numbers)
        rows = len(lengths)
        static = torch.zeros(rows, columns, *tokens.shape[2:], dtype=tokens.dtype, device=tokens.device)
        static[: tokens.shape[0], : tokens.shape[1]] = tokens
        starts_and_groups = (shared[0], shared[1]) if shared else None
        tree = None
        if self.tree is not None:
            tree = TokenTree(*(part.clone(memory_format=torch.contiguous_format) for part in _parts(self.tree)))
        return CapturedBatch(static, lengths, extent, batch.return_states, starts_and_groups, batch.window, tree)

    def fill(self, buffers: CapturedBatch, tokens: Tensor) -> None:
        """Write the batch and its `tokens` to a step's buffers."""
        buffers.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
        for static, numbers in zip((buffers.lengths, *(buffers.shared or ())), self.numbers, strict=True):
            static.copy_(numbers)
        if self.tree is not None and buffers.tree is not None:
            for static, fresh in zip(_parts(buffers.tree), _parts(self.tree), strict=True):
                static.copy_(fresh)


def fits_tree(tree: BatchTree | None, columns: int) -> bool:
    """Return whether the trees' bit masks have a separate bit for every padding token of a step this wide."""
    return tree is None or max(tree.before) + columns <= MAX_TREE_TOKENS


def _pad_tree(tree: BatchTree, rows: int, columns: int) -> BatchTree:
    """Pad the trees with rows and tokens."""
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


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a captured function's output: a ForwardOutput, a tensor, None, or a tuple of these."""
    if isinstance(output, ForwardOutput):
        output = (output.logits, output.states)
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in tensors(part)]
    return [] if output is None else [output]


@dataclass
class CapturedCall:
    """A captured function of one packed tensor of numbers.

    Attributes:
        numbers: the static int64 tensor that it reads, to be refilled before each replay.
        output: the tensors that it writes.
        replay: runs it again.
        taken: as in StaticStep.
        extra: further static tensors that it reads, by name.
        keeps: other tensors that it reads, kept alive here.
        shared: buffers that it shares with other captures, by name.
    """

    numbers: Tensor
    output: Any
    replay: Callable[[], Any]
    taken: int = 0
    extra: dict[str, Tensor] = field(default_factory=dict)
    keeps: tuple[Tensor, ...] = ()
    shared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        inputs = sum(tensor.nbytes for tensor in self.extra.values())
        return inputs + max(self.taken, sum(tensor.nbytes for tensor in tensors(self.output)))
