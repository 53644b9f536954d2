"""Feeding a draft model trees of its own drafts, one level a forward.

Contract: `root` brings a draft's cache up to date with the text and says what may follow; `level` feeds drafts
whose parents were fed before, and says what may follow each. Nothing that is fed here counts in the draft's cache:
the next proposal feeds what was accepted again, as text.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.plan import MOST_TREE

from ...engine.runner import ModelRunner
from ...machine.transfer import to_device
from ...models.draft_head import Ahead
from ...models.forward import BatchTree, ForwardBatch
from ...sequence import Sequence

# Of one row's drafts: the token, and which of the row's drafts that were fed it follows, or -1: the newest token.
Fed = tuple[int, int]


class LevelModel(Protocol):
    """A draft that trees can grow from (ModelDrafter, HeadDrafter)."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V']: the ids of its distribution's columns; None: all of the target's ids, in order."""
        ...

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Logits [B, V'] behind each row's newest token; those of rows that are not wanted mean nothing."""
        ...

    def level(self, drafts: list[list[Fed]]) -> Tensor:
        """Logits [B, W, V'] behind drafts[r][i] of each row; behind the padding they mean nothing."""
        ...

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        ...

    @property
    def reach(self) -> int:
        """The depth of the deepest drafts behind which it can be asked; a row's first drafts are 1 deep."""
        ...


class TreeFeed:
    """The drafts of a round that a runner was fed, behind rows that end at `ends`."""

    def __init__(self, runner: ModelRunner, ends: list[int]) -> None:
        self.runner, self.ends = runner, ends
        self._sees: list[list[int]] = [[] for _ in ends]
        self._depths: list[list[int]] = [[] for _ in ends]

    @property
    def fed(self) -> list[int]:
        """How many drafts of each row were fed."""
        return [len(row) for row in self._sees]

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        lengths = [end + fed for end, fed in zip(self.ends, self.fed, strict=True)]
        return min(self.runner.cache.room(lengths), MOST_TREE - max(self.fed))

    def batch(self, drafts: list[list[Fed]], x: Tensor, return_states: bool = False) -> ForwardBatch:
        """The forward of one level; x: its tokens int64 [B, W] or their embeddings [B, W, hidden]."""
        width = max(map(len, drafts))
        before = self.fed
        sees, depths = [], []
        for r, row in enumerate(drafts):
            own_sees, own_depths = self._sees[r], self._depths[r]
            for i, (_, parent) in enumerate(row):
                own_sees.append((own_sees[parent] if parent >= 0 else 0) | 1 << (before[r] + i))
                own_depths.append(1 + own_depths[parent] if parent >= 0 else 0)
            padding = range(len(own_sees), before[r] + width)
            sees.append(own_sees[before[r] :] + [1 << column for column in padding])
            depths.append(own_depths[before[r] :] + [0 for _ in padding])
        lengths = [end + fed for end, fed in zip(self.ends, before, strict=True)]
        tree = BatchTree(sees, depths, before)
        return ForwardBatch(x, lengths, [max(len(row), 1) for row in drafts], None, return_states, tree=tree)

    def tokens(self, drafts: list[list[Fed]]) -> Tensor:
        """int64 [B, W], padded."""
        width = max(map(len, drafts))
        padded = [([token for token, _ in row] + [0] * width)[:width] for row in drafts]
        return to_device(padded, self.runner.device)


class LevelStates:
    """A draft head's own states of the drafts that it was fed, for the drafts behind them."""

    def __init__(self, root: Tensor) -> None:
        """root [B, hidden]: of the newest tokens."""
        self._levels = [root[:, None]]
        # By row: where the state of each fed draft lies.
        self._places: list[list[int]] = [[] for _ in root]

    def before(self, drafts: list[list[Fed]]) -> Tensor:
        """The states [B, W, hidden] of the parents."""
        width, known = max(map(len, drafts)), torch.cat(self._levels, dim=1)
        places = [
            ([0 if parent < 0 else self._places[r][parent] for _, parent in row] + [0] * width)[:width]
            for r, row in enumerate(drafts)
        ]
        rows = torch.arange(len(drafts), device=known.device)[:, None]
        return known[rows, to_device(places, known.device)]

    def add(self, drafts: list[list[Fed]], states: Tensor) -> None:
        """states [B, W, hidden]: of these drafts; copied, as the next forward may overwrite them."""
        first = sum(level.shape[1] for level in self._levels)
        for places, row in zip(self._places, drafts, strict=True):
            places.extend(range(first, first + len(row)))
        self._levels.append(states.clone())


class LinkedLevels:
    """What a head of several positions says behind drafts that it is not fed: its link knows their tokens."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self._depths: list[list[int]] = [[] for _ in ahead.base]

    def behind(self, drafts: list[list[Fed]], tokens: Tensor) -> Tensor:
        """Logits [B, W, V'] behind these drafts, at most `count` - 1 deep; tokens [B, W]: theirs, padded."""
        width, device = tokens.shape[1], tokens.device
        places = []
        for own, row in zip(self._depths, drafts, strict=True):
            first = len(own)
            for _, parent in row:
                own.append(1 + (own[parent] if parent >= 0 else 0))
            places.append((own[first:] + [1] * width)[:width])
        return self.ahead.after(to_device(places, device), tokens)
