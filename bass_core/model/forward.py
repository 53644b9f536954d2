"""What goes into one forward of a model, and what comes out.

Contract: plain data. Whoever wants logits makes a `ForwardBatch`, which is passed unchanged to the model's own
computation. A new kind of step is one more field of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.plan import TokenTree

from ..machine.transfer import to_device


@dataclass(slots=True)
class BatchTree:
    """The trees that a batch's new tokens form (TokenTree in kernels/plan.py), on the host.

    sees[b][s]: which columns of its row's tree token s of row b sees, a bit each, its own included; depths[b][s]:
    how many of them precede it. before[b]: columns of the tree that earlier steps have fed. Both lists are as
    wide as the batch; a padding token's bit is its own column's alone.
    """

    sees: list[list[int]]
    depths: list[list[int]]
    before: list[int]


def verified_tree(parents: Sequence[Sequence[int]]) -> BatchTree:
    """Each row's newest token and its drafts as a tree; parents[b][i]: the draft that draft i follows, or -1."""
    width = 1 + max(map(len, parents))
    sees, depths = [], []
    for row in parents:
        seen, deep = [1], [0]
        for draft, parent in enumerate(row, start=1):
            seen.append(seen[parent + 1] | 1 << draft)
            deep.append(deep[parent + 1] + 1)
        padding = range(len(seen), width)
        sees.append(seen + [1 << column for column in padding])
        depths.append(deep + [0 for _ in padding])
    return BatchTree(sees, depths, [0] * len(sees))


def token_tree(tree: BatchTree, device: torch.device) -> TokenTree:
    """The trees on a device, in one copy."""
    width = len(tree.depths[0])
    rows = zip(tree.sees, tree.depths, tree.before, strict=True)
    packed = to_device([[*sees, *depths, before] for sees, depths, before in rows], device)
    return TokenTree(packed[:, :width], packed[:, width:-1], packed[:, -1])


@dataclass(slots=True)
class ForwardBatch:
    """S new tokens for each of B rows.

    tokens: ids int64 [B, S], or embeddings [B, S, hidden]. lengths: tokens of each row that are cached already.
    counts: how many tokens of each row are real, None for all; logits and states of the padding after them are
    meaningless, and a model may skip it. take: the one column of each row whose logits are wanted, None for all.
    return_states: whether to return the hidden states that the model's `readout` makes. raw_states: whether a
    model may leave that to the reader (HiddenStateTap.finish), for which few of the states may count. eager: do
    not capture the step, because its shape comes only once, as that of a prompt's chunk. window: a draft step, in
    which a row sees of its cached tokens only the first SINKS and the last `window`, rounded up to whole blocks
    (kernels/plan.py). tree: the trees that the new tokens form; None: each follows the one before it. Never beside
    a window.
    """

    tokens: Tensor
    lengths: Sequence[int]
    counts: list[int] | None = None
    take: list[int] | None = None
    return_states: bool = False
    raw_states: bool = False
    eager: bool = False
    window: int | None = None
    tree: BatchTree | None = None


@dataclass(slots=True)
class CapturedBatch:
    """What a captured step reads: static buffers, refilled before each replay, whose values the host doesn't know.

    tokens: as in ForwardBatch. lengths: int64 [B] on the device. extent: attention reads the first `extent`
    columns of the cache, and no row may grow beyond them; None for all. shared: the cache's starts and groups
    int64 [B], if it has a prefix. window: as in ForwardBatch. tree: static buffers as well, or None.
    """

    tokens: Tensor
    lengths: Tensor
    extent: int | None = None
    return_states: bool = False
    shared: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    tree: TokenTree | None = None

    @property
    def take(self) -> None:
        """The logits of all columns are returned."""
        return None


@dataclass(slots=True)
class ForwardOutput:
    """logits [B, S, V], or [B, V] if `take` chose one column per row; states [B, S, ...] if they were asked for.

    Both may be views of buffers that the next forward overwrites: copy what must be kept longer.
    """

    logits: Tensor
    states: Tensor | None = None

    def require_states(self) -> Tensor:
        """The states. Raises ValueError if the batch did not ask for them."""
        if self.states is None:
            raise ValueError("these logits came without states: the batch must say return_states=True")
        return self.states
