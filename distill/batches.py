"""Batches of rows from the corpus, for training and measuring: `load_rows`, then `Batches`.

States stay on disk until a batch needs them, so a corpus may be larger than the memory.
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
from torch import Tensor

from .corpus import open_shard

# The maximum number of positions that `scale_of` uses; a row has about 150.
SCALE_POSITIONS = 20_000
# We sort rows by length in groups of this many batches, so that the rows of a batch are about equally long.
SORTED_BATCHES = 64


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation [width] of each entry of the states; 0 and 1 for the last hidden state.

    A few entries of a residual stream are fifty times larger than the others. Without scaling, a head would learn
    only from these few entries.
    """

    mean: Tensor
    deviation: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        return (states - self.mean) / self.deviation


@dataclass
class Batch:
    """A batch of padded rows.

    Attributes:
        ids: int64 [B, T], the token ids.
        states: float [B, T, width], the target's scaled states at each id, the last hidden state last.
        scored: bool [B, T], positions whose next token the target wrote.
    """

    ids: Tensor
    states: Tensor
    scored: Tensor


def shifted(states: Tensor) -> Tensor:
    """Shift states [B, T, hidden] by one, so that position t has the state of t - 1; position 0 has zeros."""
    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)


@dataclass(frozen=True)
class Row:
    """A conversation of a shard.

    Attributes:
        tokens: int64 [n], the token ids.
        scored: bool [n], whether the target wrote the next token.
        shard: the open shard.
        start: the row's first position in the shard.
        layers: where the layers to read are among those of the shard.
    """

    tokens: Tensor
    scored: Tensor
    shard: Any
    start: int
    layers: tuple[int, ...] = ()

    def states(self, count: int) -> Tensor:
        """Read the target's states float16 [count, width] at the first `count` tokens from disk."""
        part = slice(self.start, self.start + count)
        last: Tensor = self.shard.get_slice("states")[part]
        hidden = last.shape[1]
        streams = self.shard.get_slice("streams")
        wanted = [streams[part, layer * hidden : (layer + 1) * hidden].half() for layer in self.layers]
        return torch.cat((*wanted, last), dim=1)

    def __len__(self) -> int:
        return len(self.tokens)


def load_rows(paths: list[Path], layers: tuple[int, ...] | None = None) -> list[Row]:
    """Return all rows of the shards; their states stay on disk.

    Args:
        layers: the layers to read besides the last hidden state, ascending; None for all that the shards have.

    Raises:
        SystemExit: if a shard has an older format, or lacks one of the layers.
    """
    rows = []
    for path in paths:
        shard = open_shard(path)
        tokens, scored = shard.get_tensor("tokens").long(), shard.get_tensor("scored")
        starts, stored = shard.get_tensor("starts").tolist(), shard.get_tensor("layers").tolist()
        if not set(layers or ()) <= set(stored):
            raise SystemExit(
                f"{path} has layers {stored} of the target, and the head reads {list(layers or ())}: "
                "set reads_layers, or write the corpus again in another --work folder."
            )
        wanted = tuple(stored.index(layer) for layer in (stored if layers is None else layers))
        for start, end in pairwise(starts):
            rows.append(Row(tokens[start:end], scored[start:end], shard, start, wanted))
    return rows


def frequent_ids(rows: list[Row], count: int, always: set[int]) -> Tensor:
    """Return `count` ids, int64 and sorted: `always`, and those that the target wrote most often (ties by id)."""
    seen = Counter(token for row in rows for token in row.tokens.roll(-1)[row.scored].tolist())
    # Then add ids that were never written, by id, because a tokenizer's merges are sorted by frequency.
    ranked = sorted(always) + [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))]
    ranked += range(count)
    chosen = list(dict.fromkeys(ranked))[:count]
    return torch.tensor(sorted(chosen))


def scale_of(rows: list[Row], hidden: int) -> Scale:
    """Return the mean and deviation of each entry of the states over some of the target's answers in `rows`."""
    width = rows[0].states(1).shape[1]
    mean, deviation = torch.zeros(width), torch.ones(width)
    if width > hidden:
        answers = [row.states(len(row))[row.scored] for row in rows[:: max(1, len(rows) * 150 // SCALE_POSITIONS)]]
        seen = torch.cat(answers)[:SCALE_POSITIONS, : width - hidden].float()
        mean[: width - hidden], deviation[: width - hidden] = seen.mean(0), seen.std(0).clamp(min=1e-3)
    return Scale(mean, deviation)


class Batches:
    """Endless batches of the rows that have scored tokens, in an order that depends only on the seed.

    Args:
        scale: the scale of their states.
        longest_row: rows are cut to this many tokens.
        tokens: the maximum number of tokens in a batch, including padding. A longer row is a batch by itself.
    """

    def __init__(self, rows: list[Row], scale: Scale, longest_row: int, tokens: int, seed: int) -> None:
        self.rows = [row for row in rows if row.scored[:longest_row].any()]
        if not self.rows:
            raise SystemExit("No answer of the corpus begins within longest_row tokens: increase longest_row.")
        self.scale, self.longest, self.seed, self._tokens = scale, longest_row, seed, tokens

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches number `step`, `step` + 1, ...; each epoch has a new order."""
        epoch = 0
        while True:
            batches = self._epoch(epoch)
            for part in batches[step:]:
                yield collate([self.rows[index] for index in part], self.scale, self.longest)
            epoch, step = epoch + 1, max(0, step - len(batches))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Return the indices of the rows of each batch; rows of a batch have about the same length."""
        dice = random.Random(self.seed + epoch)
        order = list(range(len(self.rows)))
        dice.shuffle(order)
        lengths = [min(len(row), self.longest) for row in self.rows]
        together = max(1, SORTED_BATCHES * self._tokens * len(lengths) // max(1, sum(lengths)))
        batches: list[list[int]] = []
        for first in range(0, len(order), together):
            batch: list[int] = []
            for index in sorted(order[first : first + together], key=lambda index: lengths[index]):
                if batch and (len(batch) + 1) * lengths[index] > self._tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        dice.shuffle(batches)
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
