"""One model with one cache: feeds rows their next tokens and remembers how far each row's cache is valid.

Contract: `cached[r]` is the number of leading tokens of row r whose keys and values are in the cache and count.
`feed` writes and advances nothing by itself; `cached` is set by who knows what was accepted. Rows in use are
0..B-1; when one leaves, the last takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..attention.cache import RaggedCache
from ..machine.transfer import to_device
from ..models.base import CausalModel

# Tokens of all rows together in one prefill chunk: a stop is noticed between two chunks.
PREFILL_TOKENS = {"cpu": 128, "accelerator": 8192}


def prefill_tokens(device: torch.device) -> int:
    """Tokens of all rows together in one prefill chunk on a device."""
    return PREFILL_TOKENS["accelerator" if is_accelerator(device) else "cpu"]


class ModelRunner:
    """A step model and a cache of `max_batch` rows x `max_len` tokens; `vocab` logits are kept.

    `prefill_tokens`, which may be set, is how many tokens of all rows a chunk of a prefill takes. With
    `keep_states`, `states` holds what `model.readout` makes of the tokens that were fed last, [B, S, hidden].
    """

    def __init__(
        self,
        model: CausalModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        keep_states: bool = False,
        *,
        cache: RaggedCache | None = None,
    ) -> None:
        self.model, self.vocab, self.backend = model, vocab, backend
        self.keep_states = keep_states
        self.states: Tensor | None = None
        self.cache = model.new_cache(max_batch, max_len) if cache is None else cache
        self.cached = [0] * max_batch
        self.device = model.device
        self.prefill_tokens = prefill_tokens(self.device)

    def feed(self, rows: list[list[int]], take: list[int] | None = None) -> Tensor:
        """Logits for the tokens of each row, put at its end; shorter rows are padded to the longest."""
        width = max(len(row) for row in rows)
        padded = [row + [0] * (width - len(row)) for row in rows]
        counts = [len(row) for row in rows]
        return self.feed_ids(to_device(padded, self.device), self.cached[: len(rows)], take, counts)

    def feed_ids(
        self, ids: Tensor, lengths: list[int], take: list[int] | None = None, counts: list[int] | None = None
    ) -> Tensor:
        """Logits [B, S, vocab] (or [B, vocab] of column take[b]) for ids int64 [B, S] fed at `lengths`.

        counts[b] tokens of a row are real; logits and states of the padding behind them mean nothing.
        """
        return self.feed_eagerly(ids, lengths, take, counts)

    def feed_eagerly(
        self, ids: Tensor, lengths: list[int], take: list[int] | None = None, counts: list[int] | None = None
    ) -> Tensor:
        """`feed_ids` for a step that comes once, as a prompt's chunk does."""
        options: Any = {"take": take, "counts": counts, "backend": self.backend}
        if self.keep_states:
            logits, self.states = self.model.forward_states(ids, self.cache, lengths, **options)
        else:
            logits = self.model.forward(ids, self.cache, lengths, **options)
        return logits if logits.shape[-1] == self.vocab else logits[..., : self.vocab]

    def prepare(self, ids: Tensor) -> None:
        """Make ready for steps of the shape [B, S] and the type of ids, whose values mean nothing.

        To be called while the cache is empty, and when it may take time; there is nothing to do without graphs.
        """

    def prefill(self, prompts: list[list[int]]) -> PrefillSteps:
        """Chunk by chunk over the prompts; equal prompts are computed once and copied."""
        return PrefillSteps(self, prompts)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        if source != target:
            self.cache.copy_row(source, target, self.cached[source])
            self.cached[target] = self.cached[source]


class PrefillSteps:
    """The prompts' way into the cache, one bounded chunk a call, so that a stop never waits long."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]]) -> None:
        self.runner, self.prompts = runner, prompts
        first: dict[tuple[int, ...], int] = {}
        self.sources = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
        self.unique = sorted(set(self.sources))
        # Rows are computed at the front of the cache and spread to their places at the end.
        self.width = max(1, runner.prefill_tokens // len(self.unique))
        self.at, self.longest = 0, max(len(prompt) for prompt in prompts)
        self.last: dict[int, Tensor] = {}
        self.chunks: list[Tensor] = []

    @property
    def done(self) -> bool:
        return self.at >= self.longest

    def step(self) -> None:
        """Feed the next chunk; after the last one every row of the cache holds its prompt."""
        runner, start = self.runner, self.at
        stop = min(start + self.width, self.longest)
        ends = [len(self.prompts[source]) for source in self.unique]
        chunk = [(self.prompts[source] + [0] * self.longest)[start:stop] for source in self.unique]
        ids = to_device(chunk, runner.device)
        take = [min(max(end - 1 - start, 0), stop - start - 1) for end in ends]
        # A prompt that has ended already is fed one token of padding: its last logits are kept elsewhere.
        counts = [max(1, min(end, stop) - start) for end in ends]
        logits = runner.feed_eagerly(ids, [start] * len(chunk), take, counts)
        if runner.states is not None:
            self.chunks.append(runner.states)
        for row, end in enumerate(ends):
            if start < end <= stop:
                self.last[row] = logits[row]
        self.at = stop
        if self.done:
            self._spread()

    def _spread(self) -> None:
        cache = self.runner.cache
        for row in reversed(range(len(self.prompts))):
            source = self.unique.index(self.sources[row])
            length = len(self.prompts[row])
            if source != row:
                cache.copy_row(source, row, length)
            self.runner.cached[row] = length

    def logits(self) -> Tensor:
        """The logits [B, vocab] after each row's last prompt token."""
        return torch.stack([self.last[self.unique.index(source)] for source in self.sources])

    def states(self) -> list[Tensor]:
        """The states [len(prompt), hidden] of each row; the runner must keep states."""
        states = torch.cat(self.chunks, dim=1)
        return [
            states[self.unique.index(source), : len(prompt)]
            for source, prompt in zip(self.sources, self.prompts, strict=True)
        ]
