"""Feed tokens to one model with one cache, and keep each row's valid length.

`lengths[r]` counts the leading tokens of row r whose keys and values are cached and valid. `forward` writes to the
cache but changes no length; the caller, who knows which drafts were accepted, then calls `commit`. Rows in use are
0 to B - 1; when one leaves, the last takes its place. Rows whose prompts begin alike read one shared prefix, which
stays in the cache until a prefill needs other prefixes (prefill.py).

Make runners with `graphs.runner_for` or `graphs.make_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..sample.rows import RaggedRows
from .base import CausalModel
from .cache import RaggedCache
from .forward import ForwardBatch, ForwardOutput
from .prefix import NOTHING_SHARED, SharedPrompts, Tokens
from .static_step import CapturedRound, DeviceText, GraphDrafts, RoundInputs, StepJudge

# Backends that can attend over a shared prefix, and over part of a cache.
SHARING = ("fused", "mixed", "pad", "split", "sdpa")
# Backends that can attend over trees of tokens.
TREES = ("fused", "mixed", "pad", "split", "sdpa")
# Tokens in one prefill chunk, summed over all rows. A request to stop is noticed between two chunks.
PREFILL_TOKENS = {"cpu": 128, "accelerator": 8192}


def prefill_tokens(device: torch.device) -> int:
    """Return the number of tokens in one prefill chunk on this device, summed over all rows."""
    return PREFILL_TOKENS["accelerator" if is_accelerator(device) else "cpu"]


class ModelRunner:
    """A model and a cache of `max_batch` rows x `max_len` tokens.

    Attributes:
        vocab: the number of logits per token to return; the model's logits after the first `vocab` are cut off.
        shared: the prefixes of the coming prompts; each row has `max_len` tokens besides its prefix.
        prefill_tokens: tokens in one prefill chunk, summed over all rows; may be set.
        copied: how many more tokens the cache would need if each row had its own copy of its prefix; may be set.
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
        # For the tokens of each cached prefix: its row in `cache.prefix`, the logits after it, and its states.
        self._prefix_entries: dict[Tokens, tuple[int, Tensor, Tensor]] = {}
        self._lengths = [0] * max_batch
        self.device = model.device
        self.prefill_tokens = prefill_tokens(self.device)
        self.copied = 0

    @property
    def nbytes_without_sharing(self) -> int:
        """The size in bytes of the cache if every row had its own copy of its prefix."""
        nbytes, cache = self.cache.buffer.nbytes, self.cache
        return nbytes + self.copied * (nbytes // (cache.max_batch * cache.max_len))

    @property
    def lengths(self) -> Sequence[int]:
        """The number of leading tokens of each row that are cached and valid; only `commit` changes it."""
        return self._lengths

    def commit(self, row: int, length: int) -> None:
        """Set a row's valid length. Nothing else changes a row's length, or moves its states."""
        self._lengths[row] = length
        if self.cache.states is not None:
            self.cache.states.commit(row, length)

    def commit_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Lengthen each row by an accepted path: paths[r] are columns after the row's length, ascending.

        The tokens of all paths that are not in the first columns are moved there together.
        """
        moves = []
        for row, path in enumerate(paths):
            end = self._lengths[row]
            # Ascending columns that end before a gap are the first ones.
            if path[-1] >= len(path):
                moves.append((row, end, [end + column for column in path]))
            self.commit(row, end + len(path))
        if moves:
            self.cache.keep_all(moves)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Feed a batch to rows 0 to B - 1; returns `vocab` logits per token, or per row with `wanted_columns`."""
        output = self.model.forward(batch, self.cache, self.backend)
        scores = output.scores
        if isinstance(scores, RaggedRows):
            output.scores = replace(scores, rows=scores.rows[:, : self.vocab])
        else:
            output.scores = scores[..., : self.vocab]
        return output

    @property
    def captures(self) -> bool:
        """Whether steps are captured, and rounds with `verify_in_graph`."""
        return False

    def captured_rounds(self, batch: int, limit: int) -> list[tuple[int, int]]:
        """Return the (rows, drafts per row) of all captures that rounds of a batch need; none without graphs.

        Args:
            batch: the number of rows at first. Rows leave when they end.
            limit: the most drafts of a row.
        """
        return []

    def verify_in_graph(
        self,
        drafts: GraphDrafts,
        judge: StepJudge,
        inputs: RoundInputs,
        return_states: bool,
        text: Tensor | None = None,
        advances: bool = False,
    ) -> CapturedRound | None:
        """Feed the newest tokens and their drafts, and judge them in the same captured graph.

        Args:
            drafts: the drafts.
            judge: what follows the forward.
            inputs: the round's numbers, with the newest tokens; the runner adds the rows' lengths and places.
            return_states: as in ForwardBatch.
            text: int64 [max_batch, T], the rows' texts, if the judge reads them (DeviceText). The newest tokens
                and the drafts are written to it.
            advances: whether the next round may be judged by the same step without numbers from the host.

        Returns:
            The judged round, or None if this runner captures no graphs of this shape.
        """
        return None

    def device_text(self) -> DeviceText | None:
        """Return the rows' texts for captured graphs; None if this runner captures none."""
        return None

    def prefix_runner(self) -> ModelRunner:
        """Forget the cached prefixes, and return a runner whose rows fill them."""
        cache = self.cache.prefix
        assert cache is not None
        self._prefix_entries = {}
        runner = ModelRunner(self.model, cache.max_batch, cache.max_len, self.vocab, self.backend, cache=cache)
        runner.prefill_tokens = self.prefill_tokens
        runner.clear_rows()  # earlier prefixes may have left states
        return runner

    def has_prefixes(self, prefixes: Sequence[Tokens], with_states: bool) -> bool:
        """Return whether all these prefixes are cached, including their states if those are wanted."""
        entries = [self._prefix_entries.get(prefix) for prefix in prefixes]
        return all(entry is not None and (len(entry[2]) > 0 or not with_states) for entry in entries)

    def store_prefixes(self, prefixes: Sequence[Tokens], logits: dict[int, Tensor], states: list[Tensor]) -> None:
        """Register prefixes[i] as the content of row i of the cache's prefix.

        Args:
            prefixes: the prefixes' tokens.
            logits: logits[i] [vocab] after prefix i.
            states: states[i] [P, hidden] of its tokens, empty if none were wanted.
        """
        rows = enumerate(prefixes)
        self._prefix_entries = {prefix: (row, logits[row].clone(), states[row]) for row, prefix in rows}

    def prefix_output(self, prefix: Tokens) -> tuple[Tensor, Tensor]:
        """Return the logits [vocab] after a cached prefix and its states [P, hidden]."""
        return self._prefix_entries[prefix][1:]

    def clear_rows(self) -> None:
        """Empty every row; the prefixes stay."""
        self.cache.detach()
        for row in range(len(self._lengths)):
            self.commit(row, 0)

    def attach(self, row: int, prefix: Tokens) -> None:
        """Make a row begin with a cached prefix, or with nothing, and set its length accordingly."""
        self.cache.attach(row, self._prefix_entries[prefix][0] if prefix else 0, len(prefix))
        self.commit(row, len(prefix))

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare for batches of this shape, dtype and return_states; the tokens' values don't matter.

        Call it while the cache is empty and before any clock runs. It does nothing without graphs.
        """

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` and its length to row `target`."""
        if source != target:
            self.cache.copy_row(source, target, self.lengths[source])
            self.commit(target, self.lengths[source])


def prefix_size(shared: SharedPrompts, max_batch: int) -> tuple[int, int]:
    """Return the rows and columns of the prefix cache; it holds as many prefixes as the rows can use at once."""
    return min(len(shared.prefixes), max_batch), shared.longest


def min_shared_tokens(model: CausalModel, backend: str) -> int | None:
    """Return how many tokens prompts must save to share a prefix; None if they can't share one."""
    return model.min_shared_tokens if backend in SHARING else None
