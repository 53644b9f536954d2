"""Who proposes tokens: the interface, and BASS's own way, a small model (others: drafting/head.py,
drafting/lookup.py).

Contract: `propose` returns up to max_drafts[r] tokens for each row of the batch, and, when sampling from a model,
the distributions they were drawn from; what is proposed never changes what the decoder writes, only how fast.
A drafter follows the decoder's rows: 0..B-1, the last taking the place of one that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.runner import ModelRunner, PrefillSteps
from ..machine.transfer import to_device
from ..sampling.distribution import argmax, probabilities
from ..sampling.draw import draw
from ..sampling.noise import NoiseKeys, Role
from ..sampling.params import SamplingParams
from ..sequence import Sequence
from .chain import chains, follow
from .pending import feed_pending


@dataclass
class Proposal:
    """tokens int64 [B, l] on the device, counts[r] of them real; probs float32 [B, l, V], None = point masses.

    copied[r]: whether row r's drafts were copied from a text; None: a drafter that does not mix does not say.
    max_probs, token_probs float32 [B, l]: the largest value of the distribution a draft was drawn from, and the
    token's own, where a drafter is asked for them (AMUSD).
    """

    tokens: Tensor
    counts: list[int]
    probs: Tensor | None = None
    copied: list[bool] | None = None
    max_probs: Tensor | None = None
    token_probs: Tensor | None = None


class Drafter(Protocol):
    """What a decoder asks of a drafter. `calls` counts forwards of a draft model.

    With an attribute `observes_states` that is true it is also given the target's states, as the tokens they
    belong to are settled: `observe_states(rows, states)`, states[r] [k, hidden] of the k tokens of row r that
    entered the target's cache for good. They are what the target's step reads out (HiddenStateTap in
    models/base.py): its last hidden states, unless the pair's draft head asks for others.
    """

    @property
    def calls(self) -> int: ...

    def start(self, rows: list[Sequence]) -> PrefillSteps | None: ...

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal: ...

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None: ...

    def rewind(self, row: int, length: int) -> None:
        """The tokens of row `row` from `length` on were taken back; what is made of them is forgotten (AMUSD)."""

    def move_row(self, source: int, target: int) -> None: ...


def observes_states(drafter: Any) -> bool:
    """Whether a drafter asks for the target's states; None, and a drafter that does not say so, do not.

    A plain attribute: since Python 3.12 an isinstance of a Protocol does not see what __getattr__ offers. A
    drafter without the attribute reads states if it has a method `observe_states`.
    """
    return bool(getattr(drafter, "observes_states", hasattr(drafter, "observe_states")))


class ModelDrafter:
    """Drafts with a second model, one forward a token, for the whole batch at once."""

    observes_states = False

    def __init__(self, runner: ModelRunner, params: SamplingParams, rule: str = "chen") -> None:
        self.runner, self.params = runner, params
        self.role = Role.TARGET if rule == "coupled" else Role.DRAFT
        self.calls = 0

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        limit = self.runner.model.context
        return self.runner.prefill([row.prompt[:limit] for row in rows])

    def prepare(self, rows: int) -> None:
        """Before the first step: let the model make ready for one token a row, and for two."""
        for width in (1, 2):
            self.runner.prepare(torch.zeros(rows, width, dtype=torch.long, device=self.runner.device))

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        runner, batch = self.runner, len(rows)
        # A draft with a shorter context than the target's falls silent when a text outgrows it.
        max_drafts = [
            max(0, min(cap, runner.model.context - len(row.tokens)))
            for row, cap in zip(rows, max_drafts, strict=True)
        ]
        length = max(max_drafts)
        if length == 0:
            return Proposal(torch.zeros(batch, 0, dtype=torch.long, device=runner.device), max_drafts)
        # The newest token is fed, and fed again where it was: what is drafted follows the logits behind it.
        starts = [min(runner.cached[r], len(row.tokens) - 1) for r, row in enumerate(rows)]
        pending = [rows[r].tokens[start:] if max_drafts[r] else [] for r, start in enumerate(starts)]
        counts = [len(tokens) for tokens in pending]
        padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in pending]
        logits, _, forwards = feed_pending(runner, to_device(padded, runner.device), starts, counts)
        self.calls += forwards
        # A row that drafts nothing is fed padding, behind its own valid tokens.
        ends = [start + max(count, 1) for start, count in zip(starts, counts, strict=True)]
        if self.params.greedy and chains(runner):
            first = argmax(logits)
            rest = follow(runner, first, ends, length - 1)
            if rest is not None:
                self.calls += length - 1
                return Proposal(torch.cat((first[:, None], rest), dim=1), max_drafts)
        tokens_, probs = [], []
        for step in range(length):
            token, prob = self._draw(logits, keys, step)
            tokens_.append(token)
            probs.append(prob)
            if step + 1 < length:
                logits = runner.feed_ids(token[:, None], [end + step for end in ends])[:, 0]
                self.calls += 1
        stacked = None if probs[0] is None else torch.stack([p for p in probs if p is not None], dim=1)
        return Proposal(torch.stack(tokens_, dim=1), max_drafts, stacked)

    def _draw(self, logits: Tensor, keys: NoiseKeys, step: int) -> tuple[Tensor, Tensor | None]:
        if self.params.greedy:
            return argmax(logits), None
        probs = probabilities(logits, self.params)
        return draw(probs, keys.seed, keys.sequence_ids, keys.positions + step, keys.stream(self.role)), probs

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """The cache holds what was fed: all but the last draft; after a full acceptance that one is missing."""
        width = proposal.tokens.shape[1]
        if width == 0:
            return
        for r, row in enumerate(rows):
            if proposal.counts[r]:
                before = len(row.tokens) - 1 - accepted[r]
                self.runner.cached[r] = before + min(accepted[r], width - 1)

    def rewind(self, row: int, length: int) -> None:
        self.runner.cached[row] = min(self.runner.cached[row], length)

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
