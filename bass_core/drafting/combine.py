"""Drafters that combine others.

Contract: drafters (drafting/base.py). `LookupChain` asks several copying drafters one after another; `Cascade`
puts a copying drafter in front of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.prefill import PrefillSteps
from ..machine.transfer import to_device
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence
from .base import Drafter, Proposal, check_chain, point_masses


class LookupChain(Drafter):
    """Several copying drafters: each row takes the first that proposes anything."""

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        for drafter in self.drafters:
            drafter.start(rows)
        return None

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        proposals = [check_chain(drafter.propose(rows, max_drafts, keys)) for drafter in self.drafters]
        chosen: list[list[int]] = [[] for _ in rows]
        for proposal in reversed(proposals):
            for r, (tokens, count) in enumerate(zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)):
                chosen[r] = tokens[:count] or chosen[r]
        return point_masses(chosen)

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        for drafter in self.drafters:
            drafter.on_verified(rows, proposal, accepted)

    def rewind(self, row: int, length: int) -> None:
        for drafter in self.drafters:
            drafter.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        for drafter in self.drafters:
            drafter.move_row(source, target)


class Cascade(Drafter):
    """Copies where the text so far knows how to go on, and asks the model for the other rows.

    In a round in which every row copies, the model is not run at all.
    """

    def __init__(self, lookup: Drafter, model: Drafter, size: int, most_drawn: int | None = None) -> None:
        """lookup copies, model drafts with a ModelDrafter or a HeadDrafter; size: the target's V.

        most_drawn: tokens of one row that the model drafts in one proposal at most; None: as many as may be.
        """
        self.lookup, self.model, self.size, self.most_drawn = lookup, model, size, most_drawn
        self._modelled: Proposal | None = None
        self.observes_states = model.observes_states

    def prepare(self, rows: int) -> None:
        """Before the first step: the model's own preparation."""
        self.model.prepare(rows)

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Hand the target's states on to the model that reads them."""
        self.model.observe_states(rows, states)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.lookup.start(rows)
        return self.model.start(rows)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        copied = check_chain(self.lookup.propose(rows, max_drafts, keys))
        copied.copied = [count > 0 for count in copied.num_drafted]
        left = [0 if count else most for count, most in zip(copied.num_drafted, max_drafts, strict=True)]
        if self.most_drawn is not None:
            left = [min(most, self.most_drawn) for most in left]
        self._modelled = None
        if max(left) == 0:
            return copied
        modelled = check_chain(self.model.propose(rows, left, keys))
        self.calls, self.drafted = self.model.calls, self.model.drafted
        self._modelled = modelled
        return self._merge(copied, modelled)

    def _merge(self, copied: Proposal, modelled: Proposal) -> Proposal:
        width = max(copied.tokens.shape[1], modelled.tokens.shape[1])
        device = modelled.tokens.device
        # What is copied stands on the host, what the model drafted on its device.
        copies = to_device(copied.num_drafted, device) > 0
        copied_tokens = _widen(to_device(copied.tokens, device), width)
        tokens = torch.where(copies[:, None], copied_tokens, _widen(modelled.tokens, width))
        num_drafted = [a or b for a, b in zip(copied.num_drafted, modelled.num_drafted, strict=True)]
        merged = Proposal(tokens, num_drafted, copied=copied.copied)
        if modelled.max_probs is not None and modelled.token_probs is not None:
            merged.max_probs = _widen(modelled.max_probs, width, 1.0).masked_fill(copies[:, None], 1.0)
            merged.token_probs = _widen(modelled.token_probs, width, 1.0).masked_fill(copies[:, None], 1.0)
        if modelled.probs is None:
            return merged
        probs = torch.zeros(len(num_drafted), width, self.size, device=device)
        probs[:, : modelled.probs.shape[1]] = modelled.probs
        points = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
        merged.probs = torch.where(copies[:, None, None], points, probs)
        return merged

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        self.lookup.on_verified(rows, proposal, accepted)
        if self._modelled is not None:
            self.model.on_verified(rows, self._modelled, accepted)
            self._modelled = None

    def rewind(self, row: int, length: int) -> None:
        self.lookup.rewind(row, length)
        self.model.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        self.lookup.move_row(source, target)
        self.model.move_row(source, target)


def _widen(values: Tensor, width: int, padding: float = 0) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=padding)
