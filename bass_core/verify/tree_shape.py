"""Trees of drafts: the shape in captured rounds (`TreeShape`), and a round's trees (`JudgedTree`).

Shapes are on the host. Tokens are on the host too, or on an accelerator until the verification's results are
copied to the host (`JudgedTree.set_tokens`). draft/tree.py makes trees and tree.py verifies them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kernels.plan import TreeMask
from kernels.support import is_accelerator

from ..machine.transfer import to_device


@dataclass(frozen=True)
class TreeShape:
    """A tree in which all drafts of a level have equally many children. Drafts are numbered level by level.

    For example, children (3, 2) are drafts 0 to 2 after the newest token, and drafts 3 and 4 after draft 0.

    Attributes:
        children: how many children each draft of the level before has, by level.
        first_drawn: by level, the index of the first drawn child among its siblings.
    """

    children: tuple[int, ...]
    first_drawn: tuple[int, ...]

    @cached_property
    def firsts(self) -> list[int]:
        """The number of the first draft of each level, and then the number of all drafts."""
        firsts, size = [0], 1
        for count in self.children:
            size *= count
            firsts.append(firsts[-1] + size)
        return firsts

    @property
    def fed(self) -> int:
        """How many of its drafts are fed: all but those of the last level."""
        return self.firsts[-2] if self.children else 0

    @cached_property
    def parents(self) -> list[int]:
        """The parent of each draft, as in TreeProposal."""
        parents, before = list[int](), [-1]
        for level, count in enumerate(self.children):
            parents += [parent for parent in before for _ in range(count)]
            before = list(range(self.firsts[level], self.firsts[level + 1]))
        return parents

    @cached_property
    def drawn(self) -> list[int]:
        """For each draft, the distribution of its row that it was drawn from, or -1: one for each parent."""
        places = list[int]()
        for level, (count, first) in enumerate(zip(self.children, self.first_drawn, strict=True)):
            of_level = self.parents[self.firsts[level] : self.firsts[level + 1]]
            places += [parent + 1 if i % count >= first else -1 for i, parent in enumerate(of_level)]
        return places

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each draft, from 1."""
        levels = zip(self.firsts, self.firsts[1:], strict=False)
        return [depth for depth, (first, end) in enumerate(levels, start=1) for _ in range(end - first)]

    @cached_property
    def sees(self) -> list[int]:
        """The bits of TreeMask.sees for each draft."""
        sees = list[int]()
        for draft, parent in enumerate(self.parents):
            sees.append((sees[parent] if parent >= 0 else 0) | 1 << draft)
        return sees

    def level(self, level: int, rows: int, sees: Tensor) -> TreeMask:
        """Return the trees in which the drafts of a level are fed; `sees` as on the device."""
        first, end = self.firsts[level], self.firsts[level + 1]
        sizes = (rows, end - first)
        depths, before = sees.new_full(sizes, level), sees.new_full((rows,), first)
        return TreeMask(sees[first:end].expand(sizes).contiguous(), depths, before)


@dataclass
class JudgedTree:
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
    ) -> JudgedTree:
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
