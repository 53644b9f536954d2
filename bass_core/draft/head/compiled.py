"""Drafts a draft head's chains in one call of our CPU kernels (`CompiledHeadDrafter`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ...model.pointer import SHORTEST
from ...model.prefill import PrefillSteps
from ...sample.distribution import ColumnProbs, filters, probabilities
from ...sample.noise import NoiseKeys
from ...sample.params import SamplingParams
from ...sample.rows import cat
from ...sequence import Sequence
from ..base import Proposal, listed
from ..chain import HEADROOM
from ..pending import CHUNK
from .chain import HeadDrafter
from .feed import CompiledFeed


class CompiledHeadDrafter(HeadDrafter):
    """A HeadDrafter for a head with `compiled_inputs`: the same drafts, bit for bit (kernels/cpu/chain.py)."""

    feed: CompiledFeed

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        # The head's ids, columns and pointer weights as arrays, made by the first chain of a request.
        self._arrays: tuple[Any, ...] | None = None
        return super().start(rows)

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        from kernels.cpu.chain import NO_KEYS, Chain, Keys  # imports numba
        from kernels.cpu.sampling.calls import signed

        params, runner, feed, inputs = self.params, self.runner, self.feed, self.feed.compiled
        levels, starts = max(max_drafts), list(runner.lengths[: len(rows)])
        ends = [len(row.tokens) for row in rows]
        width, room = max(end - start for end, start in zip(ends, starts, strict=True)), runner.cache.room
        if self.trees is not None or width > CHUNK or room(starts) < width or room(ends) < levels:
            # It drafts trees, or the tokens don't fit in one call.
            return super()._draft(rows, max_drafts, keys)
        own_keys, soft = NO_KEYS, self.confidence > 0 or not params.greedy
        if not params.greedy:
            numbers = keys.sequence_ids, keys.positions, keys.stream(self.role)
            own_keys = Keys(signed(keys.seed), *(number.contiguous().numpy() for number in numbers))
        ids, pointing = self._pointing(rows)
        chain = Chain(
            np.array(max_drafts, np.int64), inputs.fuse.packed, inputs.embedded.numpy(), ids, own_keys,
            None if params.greedy else filters(params), self.confidence, HEADROOM * self.confidence, soft=soft,
            keep=self.report_probs and params.greedy, pointing=pointing,
        )  # fmt: skip
        texts, _ = feed.unread(rows, max_drafts)
        counts = list(map(len, texts))
        x = feed.flat_inputs(texts, feed.states.take(counts))
        if 0 in counts:
            # Feed zeros in rows that don't draft.
            x = cat([part if len(part) else x.new_zeros(1, x.shape[1]) for part in x.split(counts)])
        fed = [max(count, 1) for count in counts]
        logits, drafted = runner.model.draft(x, starts, fed, runner.cache, chain)
        feed.commit(starts, counts)
        self.calls += drafted.forwards
        num_drafted = drafted.counts
        width = max(num_drafted)
        columns = drafted.columns[:width]
        full = None
        if width and not params.greedy:
            probs = torch.from_numpy(drafted.probs[:width]).transpose(0, 1)
            full = ColumnProbs(probs, self.head.vocabulary, self.head.columns_for(self.size))
        tokens = torch.from_numpy(ids.take(columns.T))
        proposal = Proposal(tokens, num_drafted, full)
        if width and chain.keep:
            own = probabilities(logits[:width], SamplingParams(temperature=1.0))
            chances = own.gather(2, torch.from_numpy(columns)[..., None])[..., 0]
            proposal.greedy_probs = partial(listed, chances.t(), num_drafted)
        return proposal

    def _pointing(self, rows: list[Sequence]) -> tuple[Any, Any]:
        """Return the ids of the head's columns, and its pointer with the texts, as the chain takes them."""
        from kernels.cpu.chain import Pointing  # imports numba

        texts = self.feed.texts
        if self._arrays is None:
            pointer = self.head.pointer
            weights = (weight.float().numpy() for weight in (pointer.weight, pointer.by_size))
            self._arrays = self.head.vocabulary.numpy(), self.head.columns.numpy(), *weights
        ids, columns, weight, by_size = self._arrays
        lengths = np.array(texts.update(rows), np.int64)
        return ids, Pointing(texts.token_ids.numpy(), lengths, columns, weight, by_size, SHORTEST)
