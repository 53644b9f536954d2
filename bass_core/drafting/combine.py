"""Drafters that combine others.

Contract: drafters (drafting/base.py). `LookupChain` asks several copying drafters one after another; `Cascade`
puts a copying drafter in front of a model; `WindowChain` lets a drafter draft for the windowed target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..budget.base import Offer
from ..engine.prefill import PrefillSteps
from ..machine.transfer import to_device
from ..models.forward import ForwardBatch
from ..sampling.distribution import probabilities
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence, WindowWork
from ..verification.acceptance import refuse_unsound
from ..verification.rejection import verify
from ..verification.table import AUTOMATIC, Verification
from .base import Drafter, Proposal, check_chain, point_masses
from .window import WindowDrafter

# The most drafts that the drafter in front makes before the windowed target verifies them.
FRONT_LENGTH = 4


class LookupChain(Drafter):
    """Several copying drafters: each row takes the first that proposes anything."""

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        for drafter in self.drafters:
            drafter.start(rows)
        return None

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Of each row, the first that offers anything; nothing takes a forward."""
        asked = zip(*(drafter.offers(rows) for drafter in self.drafters), strict=True)
        first = [next((offer for offer in offers if offer.most > 0), offers[0]) for offers in asked]
        return [offer._replace(forwards=False) for offer in first]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        proposals = [check_chain(drafter.propose(rows, max_drafts, keys)) for drafter in self.drafters]
        chosen: list[list[int]] = [[] for _ in rows]
        for proposal in reversed(proposals):
            for r, (tokens, count) in enumerate(zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)):
                chosen[r] = tokens[:count] or chosen[r]
        merged = point_masses(chosen)
        counts = zip(*(proposal.num_drafted for proposal in proposals), strict=True)
        first = [next((i for i, count in enumerate(row) if count), 0) for row in counts]
        merged.sources = [self.drafters[i].source for i in first]
        return merged

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
        self.observes_states, self.source = model.observes_states, model.source
        self.raw_states = model.raw_states

    def prepare(self, rows: int) -> None:
        """Before the first step: the model's own preparation."""
        self.model.prepare(rows)

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Hand the target's states on to the model that reads them."""
        self.model.observe_states(rows, states)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.lookup.start(rows)
        return self.model.start(rows)

    def read(self, rows: list[Sequence]) -> None:
        """Let the model read the prompts."""
        self.model.read(rows)

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """A copy where there is one, else the model's offer."""
        both = zip(self.lookup.offers(rows), self.model.offers(rows), strict=True)
        return [copied if copied.most > 0 else modelled for copied, modelled in both]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        copied = check_chain(self.lookup.propose(rows, max_drafts, keys))
        copied.copied = [count > 0 for count in copied.num_drafted]
        copied.sources = [self.lookup.source if copy else self.source for copy in copied.copied]
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
        merged = Proposal(tokens, num_drafted, copied=copied.copied, windowed=modelled.windowed)
        merged.sources, merged.own = copied.sources, _own(modelled, copied)
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


class WindowChain(Drafter):
    """Drafts by speculation: `front` drafts for the windowed target, and what that writes are the drafts.

    Each proposal is a short text of the windowed target, written in rounds of up to `length` drafts of `front`
    each, verified as every draft is. So a sampled draft is distributed as the windowed target's p, which is the q
    of the whole target's verification; its noise is NoiseKeys.inner. Greedy and coupled drafts are the windowed
    target's own choices. What `front` learnt of the drafts is taken back when they are proposed. `calls` and
    `drafted` count those of `front`. Source: TriForce, Sun et al. 2404.11912, section 4.
    """

    source = "window"

    def __init__(
        self,
        front: Drafter,
        window: WindowDrafter,
        verification: Verification = AUTOMATIC,
        length: int = FRONT_LENGTH,
    ) -> None:
        self.front, self.window, self.length = front, window, length
        self.verification = verification
        self.observes_states = front.observes_states
        self._own_noise = not (window.params.greedy or verification.coupled)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        return self.front.start(rows)

    def prepare(self, rows: int) -> None:
        """Before the first step: both drafters' own preparation."""
        self.front.prepare(rows)
        self.window.prepare(rows)

    def read(self, rows: list[Sequence]) -> None:
        """Let the drafter in front read the prompts."""
        self.front.read(rows)

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Hand the target's states on."""
        self.front.observe_states(rows, states)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        max_drafts = self.window.usable(rows, max_drafts)
        ends = [len(row.tokens) for row in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        work = WindowWork()
        try:
            for number in range(max(max_drafts)):
                left = [
                    end + most - len(row.tokens) for end, most, row in zip(ends, max_drafts, rows, strict=True)
                ]
                if max(left) == 0:
                    break
                positions = to_device([len(row.tokens) for row in rows], keys.positions.device)
                own = NoiseKeys(keys.seed, keys.sequence_ids, positions)
                inner = keys.inner(number, positions) if self._own_noise else own
                for kept, new in zip(probs, self._round(rows, ends, left, inner, work), strict=True):
                    kept.extend(new)
            drafts = [row.tokens[end:] for row, end in zip(rows, ends, strict=True)]
        finally:
            for r, (row, end) in enumerate(zip(rows, ends, strict=True)):
                del row.tokens[end:]
                self.front.rewind(r, end)
        self.calls, self.drafted = self.front.calls, self.front.drafted
        proposal = point_masses(drafts)
        proposal.windowed = work
        if self._own_noise and any(drafts):
            vocab = next(q.shape[-1] for row in probs for q in row)
            device = self.window.target.device
            whole = [torch.cat(row) if row else torch.zeros(0, vocab, device=device) for row in probs]
            proposal.probs = pad_sequence(whole, batch_first=True)
        return proposal

    def _round(
        self, rows: list[Sequence], ends: list[int], left: list[int], keys: NoiseKeys, work: WindowWork
    ) -> list[list[Tensor]]:
        """Append up to left[r] tokens, and if left[r] at least one, to each row.

        Returns what each row's were drawn from: one tensor [n, V], or none.
        """
        runner = self.window.target
        # A row that has all its drafts is fed padding where they begin.
        starts = [(len(row.tokens) if n else end) - 1 for row, n, end in zip(rows, left, ends, strict=True)]
        most = min(self.length, runner.cache.room(starts) - 1)
        asked = [max(0, min(n - 1, most)) for n in left]
        proposal = point_masses([[] for _ in rows])
        if max(asked):
            proposal = check_chain(self.front.propose(rows, asked, keys))
        drafts = to_device(proposal.tokens, runner.device)
        newest = to_device([[row.tokens[start]] for row, start in zip(rows, starts, strict=True)], runner.device)
        real = [count + 1 for count in proposal.num_drafted]
        output = self.window.forward(
            ForwardBatch(
                torch.cat((newest, drafts), dim=1),
                starts,
                real,
                return_states=self.observes_states,
                window=self.window.window,
            ),
            work,
        )
        counts = to_device(proposal.num_drafted, runner.device)
        params = self.window.params
        outcome = verify(
            output.logits, drafts, proposal.probs, counts, keys, params, verification=self.verification
        )
        outcomes = outcome.host()
        refuse_unsound([one.next_token for one, n in zip(outcomes, left, strict=True) if n])
        written = [one.accepted + 1 if n else 0 for one, n in zip(outcomes, left, strict=True)]
        probs = probabilities(output.logits, params) if self._own_noise else None
        if max(asked) and self.observes_states:
            states = output.require_states()
            self.front.observe_states(rows, [states[r, :count] for r, count in enumerate(written)])
        for row, one, count in zip(rows, outcomes, written, strict=True):
            row.tokens.extend([*(test.token for test in one.tests[: one.accepted]), one.next_token][:count])
        if max(asked):
            self.front.on_verified(rows, proposal, [one.accepted for one in outcomes])
        return [[probs[r, :count]] if probs is not None and count else [] for r, count in enumerate(written)]

    def move_row(self, source: int, target: int) -> None:
        self.front.move_row(source, target)


def _own(modelled: Proposal, copied: Proposal) -> Callable[[], list[list[float | None]]] | None:
    """The probabilities of the model's drafts; None for each draft of a row that copied."""
    own = modelled.own
    if own is None:
        return None
    return lambda: [[None] * n or row for n, row in zip(copied.num_drafted, own(), strict=True)]


def _widen(values: Tensor, width: int, padding: float = 0) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=padding)
