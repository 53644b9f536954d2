"""The drafts of a round as trees.

The shapes are on the host. The tokens are on the host too, or on an accelerator until the verification's results
are copied to the host (`set_tokens`). draft/tree.py makes trees and tree.py verifies them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..machine.transfer import to_device


@dataclass
class DraftTree:
    """The drafts of a round as trees, one per row; lists have one entry per row and draft.

    Attributes:
        tokens: the drafts; empty until `set_tokens` if `device_tokens` is set.
        parents: parents[b][i] is the draft that draft i follows (below i), or -1 for the newest token. For
            example, [-1, -1, 0] is two drafts after the newest token and one after the first of them.
        drawn: drawn[b][i] is the row of `probs` that draft i was drawn from, or -1 if it was not drawn. None if no
            draft was drawn.
        probs: float32 [D, V], the distributions that drafts were drawn from.
        device_tokens: int64 [B, N], the tokens on the device, if the host has not read them.
        depths: depths[b][i] is the number of tokens from the newest one to draft i.
        children: for each row, a dictionary from (parent, token) to the first draft with that parent and token.
        others: the same as `children`, for the drafts that were not drawn.
        drawn_at: for each row, a dictionary from a parent to its drawn child.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    drawn: list[list[int]] | None = None
    probs: Tensor | None = None
    device_tokens: Tensor | None = None
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
        if self.device_tokens is None:
            self.set_tokens(self.tokens)

    @classmethod
    def of(
        cls, drafts: Tensor, parents: list[list[int]], drawn: list[list[int]] | None, probs: Tensor | None
    ) -> DraftTree:
        """Return the trees of drafts int64 [B, N]; does not read tokens from an accelerator."""
        if is_accelerator(drafts.device):
            return cls([], parents, drawn, probs, drafts)
        return cls(
            [row[: len(shape)] for row, shape in zip(drafts.tolist(), parents, strict=True)], parents, drawn, probs
        )

    def set_tokens(self, tokens: list[list[int]]) -> None:
        """Set the tokens, by row; a row may be padded."""
        self.tokens = [row[: len(shape)] for row, shape in zip(tokens, self.parents, strict=True)]
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
        """Return the tokens on the device, padded: int64 [B, width]."""
        if self.device_tokens is not None:
            return self.device_tokens
        return to_device([(row + [0] * width)[:width] for row in self.tokens], device)

    def path(self, row: int, last: int) -> list[int]:
        """Return the drafts from the first one to `last`; [] for -1."""
        drafts: list[int] = []
        while last >= 0:
            drafts.append(last)
            last = self.parents[row][last]
        return drafts[::-1]
