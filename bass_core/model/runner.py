"""One model with one cache: feeds rows their next tokens and remembers how far each row's cache is valid.

Contract: `lengths[r]` is the number of leading tokens of row r whose keys and values are in the cache and valid.
`forward` writes to the cache and changes no length; the caller, who knows what was accepted, calls `commit`. Rows
in use are 0..B-1; when one leaves, the last takes its place. Rows whose prompts begin alike read one prefix, which
stays until a prefill needs others (prefill.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.support import is_accelerator

from .base import CausalModel
from .cache import RaggedCache
from .forward import ForwardBatch, ForwardOutput
from .prefix import NOTHING_SHARED, SharedPrompts, Tokens

# The backends that attend over a prefix beside a row's own cache, and over parts of a cache.
SHARING = ("fused", "mixed", "pad", "split", "sdpa")
# The backends that attend over trees of tokens.
TREES = ("fused", "mixed", "pad", "split", "sdpa")
# Tokens in one prefill chunk, summed over all rows. A request to stop is noticed between two chunks.
PREFILL_TOKENS = {"cpu": 128, "accelerator": 8192}


def prefill_tokens(device: torch.device) -> int:
    """Tokens in one prefill chunk on a device, summed over all rows."""
    return PREFILL_TOKENS["accelerator" if is_accelerator(device) else "cpu"]


class ModelRunner:
    """A model and a cache of `max_batch` rows x `max_len` tokens; the first `vocab` logits are kept.

    shared: prefixes of the prompts to come, beside which each row has `max_len` tokens of its own.
    `prefill_tokens`, which may be set: tokens in one prefill chunk, summed over all rows. `copied`, which may be
    set: tokens that the rows would hold again if each kept a copy of its prefix.
    """

    def __init__(
        self,
        model: CausalModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        *,
        shared: SharedPrompts = NOTHING_SHARED,
        cache: RaggedCache | None = None,
    ) -> None:
        self.model, self.vocab, self.backend, self.shared = model, vocab, backend, shared
        self.cache = (
            model.new_cache(max_batch, max_len, *prefix_size(shared, max_batch)) if cache is None else cache
        )
        # The prefixes that are in the cache, by their tokens: the row of the cache's prefix, logits, states.
        self._held: dict[Tokens, tuple[int, Tensor, Tensor]] = {}
        self._lengths = [0] * max_batch
        self.device = model.device
        self.prefill_tokens = prefill_tokens(self.device)
        self.copied = 0

    @property
    def bytes_of_copies(self) -> int:
        """Bytes of a cache in which every row keeps a copy of its prefix."""
        own, cache = self.cache.buffer.nbytes, self.cache
        return own + self.copied * (own // (cache.max_batch * cache.max_len))

    @property
    def lengths(self) -> Sequence[int]:
        """How many leading tokens of each row are in the cache and valid; only `commit` changes it."""
        return self._lengths

    def commit(self, row: int, length: int, path: Sequence[int] = ()) -> None:
        """Set a row's valid length to `length`: the only place where a row's length changes.

        path: which of the columns after the old length hold the row's last len(path) tokens, ascending: those of
        a tree whose path was accepted. They become the columns up to `length`. None: they lie there already.
        """
        first, end = length - len(path), self._lengths[row]
        if list(path) != list(range(first - end, length - end)):
            self.cache.keep(row, first, [end + column for column in path])
        self._lengths[row] = length

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Feed a batch of rows 0..B-1; returns `vocab` logits for each token, or one token per row (`take`)."""
        output = self.model.forward(batch, self.cache, self.backend)
        if output.logits.shape[-1] != self.vocab:
            output.logits = output.logits[..., : self.vocab]
        return output

    def over_prefix(self) -> ModelRunner:
        """A runner of the cache's prefix, whose rows are the prefixes; what was there is forgotten."""
        cache = self.cache.prefix
        assert cache is not None
        self._held = {}
        made = ModelRunner(self.model, cache.max_batch, cache.max_len, self.vocab, self.backend, cache=cache)
        made.prefill_tokens = self.prefill_tokens
        return made

    def holds(self, prefixes: Sequence[Tokens], with_states: bool) -> bool:
        """Whether all these prefixes are in the cache, and their states here if those are wanted."""
        kept = [self._held.get(prefix) for prefix in prefixes]
        return all(one is not None and (len(one[2]) > 0 or not with_states) for one in kept)

    def hold(self, prefixes: Sequence[Tokens], logits: dict[int, Tensor], states: list[Tensor]) -> None:
        """Row i of the cache's prefix now holds prefixes[i], with the logits [vocab] after it.

        states[i] [P, hidden] are those of its tokens, empty if none were asked for.
        """
        rows = enumerate(prefixes)
        self._held = {prefix: (row, logits[row].clone(), states[row]) for row, prefix in rows}

    def held(self, prefix: Tokens) -> tuple[Tensor, Tensor]:
        """The logits [vocab] after a prefix that is in the cache, and its states [P, hidden]."""
        return self._held[prefix][1:]

    def begin(self) -> None:
        """Every row is empty; the prefixes stay."""
        self.cache.detach()
        for row in range(len(self._lengths)):
            self.commit(row, 0)

    def attach(self, row: int, prefix: Tokens) -> None:
        """Let a row begin with a prefix that is in the cache, or with nothing; so long it is then."""
        self.cache.attach(row, self._held[prefix][0] if prefix else 0, len(prefix))
        self.commit(row, len(prefix))

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare for batches of this shape, dtype and return_states; the values of the tokens don't matter.

        Call it while the cache is empty and time doesn't matter. Without graphs there is nothing to do.
        """

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`, and its length with it."""
        if source != target:
            self.cache.copy_row(source, target, self.lengths[source])
            self.commit(target, self.lengths[source])


def prefix_size(shared: SharedPrompts, max_batch: int) -> tuple[int, int]:
    """Rows and columns of the prefix of a cache: as many prefixes as rows can need at once."""
    return min(len(shared.prefixes), max_batch), shared.longest


def least_saved(model: CausalModel, backend: str) -> int | None:
    """The fewest tokens that prompts must save to share a prefix of this model's; None if none can be shared."""
    return model.least_saved if backend in SHARING else None
