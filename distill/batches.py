"""Batches of rows from the corpus, for training and for measuring.

Contract: `Batches` is deterministic for a seed and can start at any step. Rows are cut to `longest_row` tokens and
padded at the end; those of a batch are about as long, and have `tokens` tokens at most with their padding, or are
one row. States stay on disk until a batch needs them, so a corpus may be larger than the memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# The most positions that `scale_of` uses; a row has about 150.
SCALED_BY = 20_000
# Batches of the rows that are sorted by length together.
SORTED = 64


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation [width] of each entry of the states; 0 and 1 for the last hidden state.

    A few entries of a residual stream are fifty times the others: unscaled, only these would be learnt from.
    """

    mean: Tensor
    deviation: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        return (states - self.mean) / self.deviation


@dataclass
class Batch:
    """ids int64 [B, T]; states [B, T, width] of the target at each id, scaled, the last hidden state last.

    scored bool [B, T]: slots whose next token was written by the target.
    """

    ids: Tensor
    states: Tensor
    scored: Tensor


def shifted(states: Tensor) -> Tensor:
    """The states that the slots read: slot t that of t-1, slot 0 zeros; [B, T, hidden] both."""
    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)


@dataclass(frozen=True)
class Row:
    """A conversation of a shard: tokens int64 [n], scored bool [n], and where its states lie."""

    tokens: Tensor
    scored: Tensor
    shard: Any
    start: int

    def states(self, count: int) -> Tensor:
        """The target's states float16 [count, width] at its first tokens, read from disk."""
        states: Tensor = self.shard.get_slice("states")[self.start : self.start + count]
        return states

    def __len__(self) -> int:
        return len(self.tokens)


def load_rows(paths: list[Path]) -> list[Row]:
    """All rows of the shards; their states stay on disk."""
    rows = []
    for path in paths:
        shard: Any = safe_open(path, "pt")
        tokens, scored = shard.get_tensor("tokens").long(), shard.get_tensor("scored")
        starts = shard.get_tensor("starts").tolist()
        for start, end in pairwise(starts):
            rows.append(Row(tokens[start:end], scored[start:end], shard, start))
    return rows


def frequent_ids(rows: list[Row], count: int, always: set[int]) -> Tensor:
    """`always` and the ids that the target wrote most often (ties by id), `count` in all: int64, sorted."""
    seen = Counter(token for row in rows for token in row.tokens.roll(-1)[row.scored].tolist())
    # Then ids that were never written, by id: a tokenizer's merges are sorted by frequency.
    ranked = sorted(always) + [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))]
    ranked += range(count)
    chosen = list(dict.fromkeys(ranked))[:count]
    return torch.tensor(sorted(chosen))


def scale_of(rows: list[Row], hidden: int) -> Scale:
    """Mean and deviation of each entry of the states over some of the target's answers in `rows`."""
    width = rows[0].states(1).shape[1]
    mean, deviation = torch.zeros(width), torch.ones(width)
    if width > hidden:
        answers = [row.states(len(row))[row.scored] for row in rows[:: max(1, len(rows) * 150 // SCALED_BY)]]
        seen = torch.cat(answers)[:SCALED_BY, : width - hidden].float()
        mean[: width - hidden], deviation[: width - hidden] = seen.mean(0), seen.std(0).clamp(min=1e-3)
    return Scale(mean, deviation)


class Batches:
    """Endless batches over the rows in which something counts, in an order given by the seed."""

    def __init__(self, rows: list[Row], scale: Scale, longest_row: int, tokens: int, seed: int) -> None:
        self.rows = [row for row in rows if row.scored[:longest_row].any()]
        if not self.rows:
            raise SystemExit("No answer of the corpus lies within longest_row: set it to more.")
        self.scale, self.longest, self.seed, self._tokens = scale, longest_row, seed, tokens

    def from_step(self, step: int) -> Iterator[Batch]:
        """Batches number `step`, `step` + 1, ...; each epoch shuffles anew."""
        epoch = 0
        while True:
            batches = self._epoch(epoch)
            for part in batches[step:]:
                yield collate([self.rows[index] for index in part], self.scale, self.longest)
            epoch, step = epoch + 1, max(0, step - len(batches))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The rows of each batch: of some batches' rows, those that are about as long."""
        chosen = random.Random(self.seed + epoch)
        order = list(range(len(self.rows)))
        chosen.shuffle(order)
        lengths = [min(len(row), self.longest) for row in self.rows]
        together = max(1, SORTED * self._tokens * len(lengths) // max(1, sum(lengths)))
        batches: list[list[int]] = []
        for first in range(0, len(order), together):
            batch: list[int] = []
            for index in sorted(order[first : first + together], key=lambda index: lengths[index]):
                if batch and (len(batch) + 1) * lengths[index] > self._tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        chosen.shuffle(batches)
        return batches


def collate(rows: list[Row], scale: Scale, longest: int) -> Batch:
    """Pad rows into one batch."""
    width = min(longest, max(map(len, rows)))
    batch = Batch(
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, len(scale.mean)),
        torch.zeros(len(rows), width, dtype=torch.bool),
    )
    for r, row in enumerate(rows):
        length = min(len(row), width)
        batch.ids[r, :length] = row.tokens[:length]
        batch.states[r, :length] = scale(row.states(length).float())
        batch.scored[r, :length] = row.scored[:length]
    return batch
