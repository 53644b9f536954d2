"""Batches of rows from the corpus, for training and for measuring.

Contract: `Batches` is deterministic for a seed and can start at any step. Rows are cut to `longest_row` tokens,
padded at the end, and grouped into batches of about `tokens_per_step` tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .corpus import rows_of

# The most positions that `scale_of` uses.
SCALED_BY = 20_000


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


Row = tuple[Tensor, Tensor, int]


def load_rows(paths: list[Path]) -> list[Row]:
    """All rows of the shards, in memory."""
    return [row for path in paths for row in rows_of(path)]


def frequent_ids(rows: list[Row], count: int, always: set[int]) -> Tensor:
    """`always` and the ids that the target wrote most often (ties by id), `count` in all: int64, sorted."""
    seen = Counter(token for tokens, _, prompt in rows for token in tokens[prompt:].tolist())
    # Then ids that were never written, by id: a tokenizer's merges are sorted by frequency.
    ranked = sorted(always) + [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))]
    ranked += range(count)
    chosen = list(dict.fromkeys(ranked))[:count]
    return torch.tensor(sorted(chosen))


def scale_of(rows: list[Row], hidden: int) -> Scale:
    """Mean and deviation of each entry of the states over the target's answers in `rows`."""
    width = rows[0][1].shape[1]
    mean, deviation = torch.zeros(width), torch.ones(width)
    if width > hidden:
        answers = [states[prompt:-1] for _, states, prompt in rows[: SCALED_BY // 64]]
        seen = torch.cat(answers)[:SCALED_BY, : width - hidden].float()
        mean[: width - hidden], deviation[: width - hidden] = seen.mean(0), seen.std(0).clamp(min=1e-3)
    return Scale(mean, deviation)


class Batches:
    """Endless batches over rows, in an order given by the seed."""

    def __init__(self, rows: list[Row], scale: Scale, longest_row: int, tokens: int, seed: int) -> None:
        self.rows, self.scale, self.longest, self.seed = rows, scale, longest_row, seed
        self._per_batch = max(1, tokens // longest_row)

    def from_step(self, step: int) -> Iterator[Batch]:
        """Batches number `step`, `step` + 1, ...; each epoch shuffles anew."""
        per_epoch = max(1, len(self.rows) // self._per_batch)
        epoch, within = divmod(step, per_epoch)
        while True:
            order = list(range(len(self.rows)))
            random.Random(self.seed + epoch).shuffle(order)
            for number in range(within, per_epoch):
                part = order[number * self._per_batch : (number + 1) * self._per_batch]
                yield collate([self.rows[index] for index in part], self.scale, self.longest)
            epoch, within = epoch + 1, 0


def collate(rows: list[Row], scale: Scale, longest: int) -> Batch:
    """Pad rows into one batch."""
    width = min(longest, max(len(tokens) for tokens, _, _ in rows))
    hidden = rows[0][1].shape[1]
    batch = Batch(
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, hidden),
        torch.zeros(len(rows), width, dtype=torch.bool),
    )
    for r, (tokens, states, prompt) in enumerate(rows):
        length = min(len(tokens), width)
        batch.ids[r, :length] = tokens[:length]
        batch.states[r, :length] = scale(states[:length].float())
        # The last token of a row was never fed, so the target's distribution after it is unknown.
        batch.scored[r, prompt - 1 : min(length, len(tokens) - 1)] = True
    return batch
