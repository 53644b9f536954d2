"""The shape of a full tree of drafts (`FullTree`), which captured rounds draft and judge in every row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernels.plan import TokenTree


@dataclass(frozen=True)
class FullTree:
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
        """The bits of TokenTree.sees for each draft."""
        sees = list[int]()
        for draft, parent in enumerate(self.parents):
            sees.append((sees[parent] if parent >= 0 else 0) | 1 << draft)
        return sees

    def level(self, level: int, rows: int, sees: Tensor) -> TokenTree:
        """Return the trees in which the drafts of a level are fed; `sees` as on the device."""
        first, end = self.firsts[level], self.firsts[level + 1]
        sizes = (rows, end - first)
        depths, before = sees.new_full(sizes, level), sees.new_full((rows,), first)
        return TokenTree(sees[first:end].expand(sizes).contiguous(), depths, before)
