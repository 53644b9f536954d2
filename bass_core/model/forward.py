"""Input and output of one forward, as plain data.

To get logits, make a `ForwardBatch`. The batch reaches the model's computation unchanged, so a new kind of step
needs only a new field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.plan import TreeMask

from ..machine.transfer import to_device
from ..sample.rows import RaggedRows, padded


@dataclass(slots=True)
class HostTreeMask:
    """The trees that a batch's new tokens form, on the host (TreeMask in kernels/plan.py).

    For example, a newest token with two drafts that both follow it has sees = [0b001, 0b011, 0b101] and depths =
    [0, 1, 1]. `sees` and `depths` are padded to the batch's width; a padding token sees only itself.

    Attributes:
        sees: sees[b][s] has a bit for each column of its row's tree that token s of row b attends to, itself
            included.
        depths: depths[b][s] is the number of tokens before it on its path.
        before: before[b] is the number of the tree's columns that earlier steps have fed.
    """

    sees: list[list[int]]
    depths: list[list[int]]
    before: list[int]


def verified_tree(parents: Sequence[Sequence[int]]) -> HostTreeMask:
    """Return each row's newest token and its drafts as a tree.

    Args:
        parents: parents[b][i] is the draft that draft i follows, or -1 if it follows the newest token.
    """
    width = 1 + max(map(len, parents))
    sees, depths = [], []
    for row in parents:
        row_sees, row_depths = [1], [0]
        for draft, parent in enumerate(row, start=1):
            row_sees.append(row_sees[parent + 1] | 1 << draft)
            row_depths.append(row_depths[parent + 1] + 1)
        padding = range(len(row_sees), width)
        sees.append(row_sees + [1 << column for column in padding])
        depths.append(row_depths + [0 for _ in padding])
    return HostTreeMask(sees, depths, [0] * len(sees))


def token_tree(tree: HostTreeMask, device: torch.device) -> TreeMask:
    """Copy the trees to a device in one transfer."""
    width = len(tree.depths[0])
    rows = zip(tree.sees, tree.depths, tree.before, strict=True)
    packed = to_device([[*sees, *depths, before] for sees, depths, before in rows], device)
    return TreeMask(packed[:, :width], packed[:, width:-1], packed[:, -1])


@dataclass(slots=True)
class ForwardBatch:
    """S new tokens for each of B rows.

    Attributes:
        tokens: ids int64 [B, S], or embeddings [B, S, hidden].
        lengths: how many tokens of each row are already cached.
        counts: how many of each row's S tokens are real, None for all. The rest is padding, which a model may
            skip; its logits and states are meaningless.
        wanted_columns: for each row, the one column whose logits are wanted; None for all columns.
        return_states: whether to return the hidden states of the model's `readout`.
        raw_states: whether a model may leave the last part of the readout to the caller (HiddenStateTap.finish),
            who may need only a few of the states.
        eager: whether to run this step without a capture, because its shape occurs only once, e.g. in a chunk of a
            prompt.
        window: for a draft step: a row sees only its first SINKS and its last `window` cached tokens, rounded up
            to whole blocks (kernels/plan.py).
        tree: the trees that the new tokens form; None if each follows the previous one. A batch can't have both a
            tree and a window.
    """

    tokens: Tensor
    lengths: Sequence[int]
    counts: list[int] | None = None
    wanted_columns: list[int] | None = None
    return_states: bool = False
    raw_states: bool = False
    eager: bool = False
    window: int | None = None
    tree: HostTreeMask | None = None


@dataclass(slots=True)
class CapturedBatch:
    """Input of a captured step: static buffers that are refilled before each replay.

    Attributes:
        tokens: as in ForwardBatch.
        lengths: int64 [B] on the device; the host doesn't know the values.
        extent: attention reads the first `extent` columns of the cache, None for all; no row may grow beyond them.
        return_states: as in ForwardBatch.
        shared: the cache's starts and groups int64 [B], if it has a prefix.
        window: as in ForwardBatch.
        tree: static buffers of the trees, or None.
    """

    tokens: Tensor
    lengths: Tensor
    extent: int | None = None
    return_states: bool = False
    shared: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    tree: TreeMask | None = None

    @property
    def wanted_columns(self) -> None:
        """None: a captured step returns the logits of all columns."""
        return None


@dataclass
class ForwardOutput:
    """Output of a forward, possibly in buffers that the next forward overwrites: copy it to keep it.

    Attributes:
        scores: the logits, or RaggedRows of them if some rows have padding.
        vectors: the hidden states in the same form if the batch asked for them, else None.
    """

    scores: Tensor | RaggedRows
    vectors: Tensor | RaggedRows | None = None

    @property
    def logits(self) -> Tensor:
        """[B, S, V], or [B, V] if the batch has `wanted_columns`; the logits of padding may be zeros."""
        self.scores = padded(self.scores)
        return self.scores

    @logits.setter
    def logits(self, logits: Tensor) -> None:
        self.scores = logits

    @property
    def states(self) -> Tensor | None:
        """[B, S, ...], or None; the states of padding may be zeros."""
        self.vectors = None if self.vectors is None else padded(self.vectors)
        return self.vectors

    def require_states(self) -> Tensor:
        """Return the states, or raise ValueError if the batch did not ask for them."""
        if (states := self.states) is None:
            raise ValueError("these logits came without states: set return_states=True in the batch")
        return states
