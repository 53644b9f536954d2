"""Drafts that a grammar makes certain, in front of another drafter's (`GrammarDrafter`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..length.base import Offer
from ..sample.distribution import ColumnProbs, Probs
from ..sample.noise import NoiseKeys
from ..sequence import Sequence
from .base import COPY, GRAMMAR, Drafter, Proposal, point_masses
from .lookup import Cascade, MergedProposal


class ForcedDrafter(Drafter):
    """Drafts the tokens that the rows' grammars force, e.g. the keys of a JSON object."""

    source = GRAMMAR
    reads_others = False

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer the forced tokens of rows that have some; `certain` is their number."""
        offers = []
        for row in rows:
            count = min(len(_forced(row)), row.remaining - 1)
            offers.append(Offer(row.remaining - 1 if count else 0, GRAMMAR, False, row=row.id, certain=count))
        return offers

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return point_masses([_forced(row)[:most] for row, most in zip(rows, max_drafts, strict=True)])


class GrammarDrafter(Cascade):
    """Drafts forced tokens in rows that have some, and with another drafter of chains in the others.

    A round verifies forced tokens like all others. Of the other drafter's drafts, those after the first forbidden
    one are cut, because they can't be accepted. The forbidden one stays if it was drawn: cutting it would let the
    drawn token choose between p and the residual, which biases the output.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(ForcedDrafter(), drafter)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        forced = self.lookup.propose(rows, max_drafts, keys)
        left = [0 if count else most for count, most in zip(forced.num_drafted, max_drafts, strict=True)]
        forced.sources, self._modelled = [GRAMMAR] * len(rows), None
        if max(left) == 0:
            return forced
        drafted = self._modelled = self.model.propose(rows, left, keys)
        self.calls, self.drafted = self.model.calls, self.model.drafted
        others = drafted.sources or [self.source] * len(rows)
        forced.sources = [GRAMMAR if n else other for n, other in zip(forced.num_drafted, others, strict=True)]
        return _cut(rows, MergedProposal(forced, drafted) if any(forced.num_drafted) else drafted, forced.sources)


def _forced(row: Sequence) -> list[int]:
    """Return the tokens that a row's grammar forces, [] without one."""
    return [] if row.grammar is None else row.grammar.forced()


def _cut(rows: list[Sequence], whole: Proposal, sources: list[str]) -> Proposal:
    """Return a proposal with each row's drafts up to the first forbidden one."""
    counts, drawn, tokens = list(whole.num_drafted), whole.probs is not None, whole.tokens.tolist()
    for r, (row, drafts) in enumerate(zip(rows, tokens, strict=True)):
        if row.grammar is not None:
            counts[r] = min(counts[r], row.grammar.fitting(drafts[: counts[r]]) + (drawn and sources[r] != COPY))
    width = max(counts)
    # On the host, where masks are made of them.
    return Proposal(
        torch.tensor(tokens, dtype=torch.long)[:, :width],
        counts,
        _narrowed(whole.probs, width),
        windowed=whole.windowed,
        sources=sources,
        greedy_probs=whole.greedy_probs,
    )


def _narrowed(probs: Probs | None, width: int) -> Probs | None:
    """Return the distributions of the first `width` drafts."""
    if probs is None or isinstance(probs, Tensor):
        return None if probs is None else probs[:, :width]
    points = None if probs.points is None else probs.points[:, :width]
    return ColumnProbs(probs.values[:, :width], probs.ids, probs.columns, points)
