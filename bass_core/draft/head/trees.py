"""Drafts trees with a draft head, level by level (`HeadTreeDrafter`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...machine.transfer import to_device
from ...sample.noise import NoiseKeys
from ...sequence import Sequence
from ..base import Proposal
from ..tree import Fed, TreeFeed, TreePlanner
from .chain import HeadDrafter
from .texts import append_token


class HeadTreeDrafter(HeadDrafter):
    """Drafts trees with the pair's draft head, which is the LevelModel of `trees`."""

    branches = True
    trees: TreePlanner

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return self.trees.propose(self, rows, max_drafts, keys)

    @property
    def vocabulary(self) -> Tensor:
        """int64 [V'], the ids that the head can propose."""
        return self.head.vocabulary

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Return the logits [B, V'] after the newest tokens. Feeds all rows."""
        logits, states = self._catch_up(rows, [1] * len(rows))
        self._fed = TreeFeed(self.runner, list(self.runner.lengths[: len(rows)]))
        last = self.feed.texts.upload(rows)
        self._states, self._last = LevelStates(states), LevelStates(last[:, 0])
        return self.feed.texts.with_pointer(logits[:, None], states[:, None], last)[:, 0]

    def level(self, drafts: list[Fed], tokens: Tensor) -> Tensor:
        """Return the logits [B, W, V'] after these drafts, which are fed with their parents' states."""
        x = self.head.inputs(tokens, self._states.before(drafts))
        output = self.runner.forward(self._fed.batch(drafts, x, return_states=True))
        self.calls += 1
        states = output.require_states()
        self._states.add(drafts, states)
        last = append_token(self._last.before(drafts), tokens)
        self._last.add(drafts, last)
        return self.feed.texts.with_pointer(output.logits, states, last)

    @property
    def room(self) -> int:
        """How many more drafts every row can be fed."""
        return self._fed.room


class LevelStates:
    """One value, for example a state, for each draft that a head was fed. Its child drafts read that value."""

    def __init__(self, root: Tensor) -> None:
        """Begin with root [B, hidden], the values of the newest tokens."""
        self._levels = [root[:, None]]
        # Per row: the column of each fed draft's state.
        self._places: list[list[int]] = [[] for _ in root]

    def before(self, drafts: list[Fed]) -> Tensor:
        """Return the states [B, W, hidden] of the parents of these drafts."""
        width, known = max(map(len, drafts)), torch.cat(self._levels, dim=1)
        places = [
            ([0 if parent < 0 else self._places[r][parent] for parent in row] + [0] * width)[:width]
            for r, row in enumerate(drafts)
        ]
        rows = torch.arange(len(drafts), device=known.device)[:, None]
        return known[rows, to_device(places, known.device)]

    def add(self, drafts: list[Fed], states: Tensor) -> None:
        """Copy the states [B, W, hidden] of these drafts, which the next forward may overwrite."""
        first = sum(level.shape[1] for level in self._levels)
        for places, row in zip(self._places, drafts, strict=True):
            places.extend(range(first, first + len(row)))
        self._levels.append(states.clone())
