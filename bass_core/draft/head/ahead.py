"""Drafts with a draft head for AMUSD, whose text runs ahead of the target's states (`AheadHeadDrafter`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from ...machine.transfer import to_device
from ...sample.distribution import largest, scatter_columns
from ...sample.noise import NoiseKeys
from ...sequence import Sequence
from ..base import Proposal, no_drafts
from .chain import HeadDrafter
from .feed import HeadFeed, padded_ids
from .states import StandInStates


class AheadHeadDrafter(HeadDrafter):
    """Drafts at most one token per row, with the head's own states until the target's arrive.

    A row gets no draft if a state is missing, for example after a copied token, which the head was not fed. A
    confidence above 0 stops no row, but adds `max_probs` and `token_probs` to the proposals.
    """

    raw_states, reads_early = False, False
    feed: AheadFeed

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        complete = (self.feed.states.complete(r, len(row.tokens)) for r, row in enumerate(rows))
        counts = [min(most, 1) if able else 0 for most, able in zip(max_drafts, complete, strict=True)]
        if not any(counts):
            return no_drafts(counts, self.runner.device)
        levels = self.levels(rows, counts)
        step = next(self.chains.steps(levels, next(levels), 1, keys))
        proposal = Proposal(step.tokens[:, None], counts)
        if step.q is not None:
            proposal.probs = scatter_columns(step.q[:, None], self.vocabulary, self.size)
        if self.confidence:
            proposal.max_probs, proposal.token_probs = largest(step.probs)[1][:, None], step.chances
        return proposal


class AheadFeed(HeadFeed):
    """Reads a text with the target's states as far as they have arrived, and after that with the head's own.

    When states of the target arrive, the tokens after them are read again. So prefixes can't be shared.
    """

    states: StandInStates  # type: ignore[assignment]

    def start(self, rows: int) -> None:
        super().start(rows)
        runner, self.began = self.runner, True
        self.states = StandInStates(rows, runner.cache.max_len, self.head.config.hidden, runner.device)

    def observe(self, states: Seq[Tensor]) -> None:
        for r, slot in self.states.observe(states).items():
            self.runner.commit(r, min(self.runner.lengths[r], slot))

    def catch_up(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[Tensor, Tensor, int]:
        runner, fed = self.runner, [r for r, most in enumerate(max_drafts) if most]
        for r in fed:
            # The logits after the newest token are needed, so read that token even if it was read before.
            runner.commit(r, min(runner.lengths[r], len(rows[r].tokens) - 1))
        logits, states, forwards = super().catch_up(rows, max_drafts, ends)
        self.states.keep(fed, [runner.lengths[r] for r in fed], states[to_device(fed, states.device)])
        return logits, states, forwards

    def next_inputs(self, texts: list[list[int]], starts: list[int]) -> Tensor:
        ids = padded_ids(texts, self.runner.device)
        return self.head.inputs(ids, self.states.read(starts, ids.shape[1]))

    def rewind(self, row: int, length: int) -> None:
        self.runner.commit(row, min(self.runner.lengths[row], length))
        self.texts.rewind(row, length)
        self.states.rewind(row, length)
