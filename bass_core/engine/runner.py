"""One model with one cache: feeds rows their next tokens and remembers how far each row's cache is valid.

Contract: `lengths[r]` is the number of leading tokens of row r whose keys and values are in the cache and valid.
`forward` writes to the cache and changes no length; the caller, who knows what was accepted, calls `commit`. Rows
in use are 0..B-1; when one leaves, the last takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..attention.cache import RaggedCache
from ..machine.transfer import to_device
from ..models.base import CausalModel
from ..models.forward import ForwardBatch, ForwardOutput

# Tokens in one prefill chunk, summed over all rows. A request to stop is noticed between two chunks.
PREFILL_TOKENS = {"cpu": 128, "accelerator": 8192}


def prefill_tokens(device: torch.device) -> int:
    """Tokens in one prefill chunk on a device, summed over all rows."""
    return PREFILL_TOKENS["accelerator" if is_accelerator(device) else "cpu"]


class ModelRunner:
    """A model and a cache of `max_batch` rows x `max_len` tokens; the first `vocab` logits are kept.

    `prefill_tokens`, which may be set: tokens in one prefill chunk, summed over all rows.
    """

    def __init__(
        self,
        model: CausalModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        *,
        cache: RaggedCache | None = None,
    ) -> None:
        self.model, self.vocab, self.backend = model, vocab, backend
        self.cache = model.new_cache(max_batch, max_len) if cache is None else cache
        self._lengths = [0] * max_batch
        self.device = model.device
        self.prefill_tokens = prefill_tokens(self.device)

    @property
    def lengths(self) -> Sequence[int]:
        """How many leading tokens of each row are in the cache and valid; only `commit` changes it."""
        return self._lengths

    def commit(self, row: int, length: int) -> None:
        """Set a row's valid length to `length`: the only place where a row's length changes.

        Later it will also compact the accepted path of a token tree.
        """
        self._lengths[row] = length

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Feed a batch of rows 0..B-1; returns `vocab` logits for each token, or one token per row (`take`)."""
        output = self.model.forward(batch, self.cache, self.backend)
        if output.logits.shape[-1] != self.vocab:
            output.logits = output.logits[..., : self.vocab]
        return output

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare for batches of this shape, dtype and return_states; the values of the tokens don't matter.

        Call it while the cache is empty and time doesn't matter. Without graphs there is nothing to do.
        """

    def prefill(self, prompts: list[list[int]], return_states: bool = False) -> PrefillSteps:
        """Steps that feed the prompts chunk by chunk; equal prompts are computed once and copied."""
        return PrefillSteps(self, prompts, return_states)

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`, and its length with it."""
        if source != target:
            self.cache.copy_row(source, target, self.lengths[source])
            self.commit(target, self.lengths[source])


class PrefillSteps:
    """Feeds prompts to the cache, one bounded chunk per call, so that a request to stop never waits long."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], return_states: bool) -> None:
        self.runner, self.prompts, self.return_states = runner, prompts, return_states
        first: dict[tuple[int, ...], int] = {}
        self.sources = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
        self.unique = sorted(set(self.sources))
        # Unique prompts are computed in the first rows of the cache and copied to their own rows at the end.
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
        # A prompt that has ended is fed one token of padding; its last logits are in self.last.
        counts = [max(1, min(end, stop) - start) for end in ends]
        starts = [start] * len(chunk)
        output = runner.forward(ForwardBatch(ids, starts, counts, take, self.return_states, eager=True))
        if output.states is not None:
            self.chunks.append(output.states)
        for row, end in enumerate(ends):
            if start < end <= stop:
                self.last[row] = output.logits[row]
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
            self.runner.commit(row, length)

    def logits(self) -> Tensor:
        """The logits [B, vocab] after each row's last prompt token."""
        return torch.stack([self.last[self.unique.index(source)] for source in self.sources])

    def states(self) -> list[Tensor]:
        """The states [len(prompt), hidden] of each row, if the prefill was asked to return them."""
        states = torch.cat(self.chunks, dim=1)
        return [
            states[self.unique.index(source), : len(prompt)]
            for source, prompt in zip(self.sources, self.prompts, strict=True)
        ]
