"""The drafts of a round as trees.

Contract: their shape is on the host; their tokens are, or they stay on an accelerator until what was verified is
read (`arrive`). Non-goals: making trees (draft/tree.py), walking through them (tree.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..machine.transfer import to_device


@dataclass
class DraftTree:
    """The drafts of a round as trees, one a row, on the host; lists of a row are as long as it has drafts.

    parents[b][i]: the draft that draft i follows, below i, or -1: the newest token. drawn[b][i]: the row of
    `probs` float32 [D, V] that draft i was drawn from, or -1 if it was not drawn; None: none was.
    placed: int64 [B, N], the tokens on the device where the host has not read them: then `tokens` is empty until
    `arrive`. depths[b][i]: tokens from the newest one to draft i. children[b]: by parent and token, the first such
    draft; others[b]: the same of those not drawn; drawn_at[b]: by parent, the draft that was.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    drawn: list[list[int]] | None = None
    probs: Tensor | None = None
    placed: Tensor | None = None
    depths: list[list[int]] = field(init=False)
    children: list[dict[tuple[int, int], int]] = field(init=False)
    others: list[dict[tuple[int, int], int]] = field(init=False)
    drawn_at: list[dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.depths = []
        for parents in self.parents:
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            self.depths.append(depths)
        if self.placed is None:
            self.arrive(self.tokens)

    @classmethod
    def of(
        cls, drafts: Tensor, parents: list[list[int]], drawn: list[list[int]] | None, probs: Tensor | None
    ) -> DraftTree:
        """The trees of drafts int64 [B, N], which are not read from an accelerator before they are verified."""
        if is_accelerator(drafts.device):
            return cls([], parents, drawn, probs, drafts)
        return cls(
            [row[: len(own)] for row, own in zip(drafts.tolist(), parents, strict=True)], parents, drawn, probs
        )

    def arrive(self, tokens: list[list[int]]) -> None:
        """The drafts by row; a row may be longer than it has drafts."""
        self.tokens = [row[: len(own)] for row, own in zip(tokens, self.parents, strict=True)]
        rows = range(len(self.tokens))
        self.drawn_at, self.children, self.others = [{} for _ in rows], [{} for _ in rows], [{} for _ in rows]
        for r in rows:
            for i, (token, parent) in enumerate(zip(self.tokens[r], self.parents[r], strict=True)):
                self.children[r].setdefault((parent, token), i)
                if self.drawn is not None and self.drawn[r][i] >= 0:
                    self.drawn_at[r][parent] = i
                else:
                    self.others[r].setdefault((parent, token), i)

    def on(self, device: torch.device, width: int) -> Tensor:
        """int64 [B, width]: the tokens on the device, padded."""
        if self.placed is not None:
            return self.placed
        return to_device([(row + [0] * width)[:width] for row in self.tokens], device)

    def path(self, row: int, last: int) -> list[int]:
        """The drafts from the first to `last`; none for -1."""
        found: list[int] = []
        while last >= 0:
            found.append(last)
            last = self.parents[row][last]
        return found[::-1]
