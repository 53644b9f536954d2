"""Batches of rows from the corpus, for training and measuring: `load_rows`, a `Reader`, then `Batches`.

States stay on disk until a batch needs them, so a corpus may be larger than the memory. If the corpus has only
ids, or lacks a layer, the target computes the states of each batch. On a GPU that is little work (read, not run).
On two cores of an AMD EPYC (AVX2, shared) it takes 25 s for 4,096 tokens (int8), and the training step after it
9 s, or 16 s with two levels of own states. So on a CPU, store states.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bass_core import ModelPair
from bass_core.decode.request import make_request
from bass_core.machine.transfer import to_device
from bass_core.model.base import HiddenStateTap
from bass_core.model.forward import ForwardBatch

from .corpus import open_shard, read_ids

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


class StoredStates(NamedTuple):
    """States of a row that are in its shard.

    Attributes:
        shard: the open shard.
        start: the row's first position in the shard.
        places: where the layers to read are among those of the shard.
    """

    shard: Any
    start: int
    places: list[int]

    def read(self, count: int) -> Tensor:
        """Return the target's states float32 [count, width] at the row's first `count` tokens."""
        part = slice(self.start, self.start + count)
        last: Tensor = self.shard.get_slice("states")[part]
        hidden, streams = last.shape[1], self.shard.get_slice("streams")
        wanted = [streams[part, place * hidden : (place + 1) * hidden] for place in self.places]
        return torch.cat([states.float() for states in (*wanted, last)], dim=1)


@dataclass(frozen=True)
class Row:
    """A conversation of a shard.

    Attributes:
        tokens: int64 [n], the token ids.
        scored: bool [n], whether the target wrote the next token.
        stored: the row's states, or None if the target has to compute them.
    """

    tokens: Tensor
    scored: Tensor
    stored: StoredStates | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def load_rows(paths: list[Path], layers: tuple[int, ...] = ()) -> list[Row]:
    """Return all rows of the shards; their states, if stored, stay on disk.

    Args:
        paths: the shards.
        layers: the target's layers to read besides the last hidden state, ascending.

    Raises:
        SystemExit: if a shard has an older format.
    """
    rows = []
    for path in paths:
        shard = open_shard(path)
        tokens, scored = read_ids(shard)
        stored = shard.get_tensor("layers").tolist() if "layers" in shard.keys() else None  # noqa: SIM118
        places = None if stored is None or not set(layers) <= set(stored) else list(map(stored.index, layers))
        for start, end in pairwise(shard.get_tensor("starts").tolist()):
            states = None if places is None else StoredStates(shard, start, places)
            rows.append(Row(tokens[start:end], scored[start:end], states))
    return rows


@dataclass(frozen=True)
class Reader:
    """Makes batches of rows on the pair's device: pads them, and reads or computes the target's states.

    Attributes:
        layers: the target's layers to read besides the last hidden state, those of `load_rows`.
        longest_row: rows are cut to this many tokens.
        scale: the scale of the states; None leaves them as they are.
    """

    pair: ModelPair
    layers: tuple[int, ...]
    longest_row: int
    scale: Scale | None = None

    def __call__(self, rows: list[Row]) -> Batch:
        """Return a batch of all these rows."""
        cut, device = self.longest_row, self.pair.device
        ids = to_device(pad_sequence([row.tokens[:cut] for row in rows], batch_first=True), device)
        scored = to_device(pad_sequence([row.scored[:cut] for row in rows], batch_first=True), device)
        lengths = [min(len(row), cut) for row in rows]
        stored = [row.stored.read(length) for row, length in zip(rows, lengths, strict=True) if row.stored]
        if len(stored) == len(rows):
            states = to_device(pad_sequence(stored, batch_first=True), device)
        else:
            states = self._computed(ids, lengths)
        return Batch(ids, states if self.scale is None else self.scale(states), scored)

    def _computed(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """Return the target's states float32 [B, T, width] at each id."""
        step, none_cached, first = self.pair.target_step, [0] * len(ids), [0] * len(ids)
        batch = ForwardBatch(ids, none_cached, lengths, first, return_states=True, eager=True)
        readout, step.readout = step.readout, HiddenStateTap(self.layers)
        try:
            cache, backend = step.new_cache(*ids.shape), make_request(self.pair, "x").backend
            states = step.forward(batch, cache, backend).require_states()
        finally:
            step.readout = readout
        # A copy, because autograd can't use tensors of inference mode.
        return states.to(torch.float32, copy=True)


def frequent_ids(rows: list[Row], count: int, always: set[int]) -> Tensor:
    """Return `count` ids, int64 and sorted: `always`, and those that the target wrote most often (ties by id)."""
    written = torch.cat([row.tokens.roll(-1)[row.scored] for row in rows])
    times = written.bincount(minlength=max(count, *always, 0) + 1)
    times[list(always)] = len(written) + 1
    # A stable sort leaves equally frequent ids in their order: a tokenizer's merges are sorted by frequency.
    return times.argsort(descending=True, stable=True)[:count].sort().values


def scale_of(rows: list[Row], reader: Reader, tokens: int) -> Scale:
    """Return the mean and deviation of each entry of the states over some of the target's answers in `rows`.

    `tokens` is the maximum number of tokens in a batch.
    """
    hidden, device = reader.pair.target_step.hidden, reader.pair.device
    read = len(reader.layers) * hidden
    mean, deviation = torch.zeros(read + hidden, device=device), torch.ones(read + hidden, device=device)
    if read:
        some = Batches(rows[:: max(1, len(rows) * 150 // SCALE_POSITIONS)], replace(reader, scale=None), tokens, 0)
        batches = map(some.batch, some.epoch(0))
        seen = torch.cat([batch.states[batch.scored] for batch in batches])[:SCALE_POSITIONS, :read]
        mean[:read], deviation[:read] = seen.mean(0), seen.std(0).clamp(min=1e-3)
    return Scale(mean, deviation)


class Batches:
    """Endless batches of the rows that have scored tokens, in an order that depends only on the seed.

    Args:
        tokens: the maximum number of tokens in a batch, including padding. A longer row is a batch by itself.
    """

    def __init__(self, rows: list[Row], reader: Reader, tokens: int, seed: int) -> None:
        self.rows = [row for row in rows if row.scored[: reader.longest_row].any()]
        if not self.rows:
            raise SystemExit("No answer of the corpus begins within longest_row tokens: increase longest_row.")
        self.reader, self.seed, self._tokens = reader, seed, tokens

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches number `step`, `step` + 1, ...; each epoch has a new order."""
        epoch = 0
        while True:
            batches = self.epoch(epoch)
            yield from map(self.batch, batches[step:])
            epoch, step = epoch + 1, max(0, step - len(batches))

    def batch(self, indices: list[int]) -> Batch:
        """Return the batch of these rows."""
        return self.reader([self.rows[index] for index in indices])

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the indices of the rows of each batch; rows of a batch have about the same length."""
        dice = random.Random(self.seed + epoch)
        order = list(range(len(self.rows)))
        dice.shuffle(order)
        lengths = [min(len(row), self.reader.longest_row) for row in self.rows]
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
