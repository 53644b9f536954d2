"""Who proposes tokens: the interface, and BASS's own way, a small model (others: head_drafter.py, lookup.py).

Contract: `propose` returns up to caps[r] tokens for each row of the batch, and, when sampling from a model, the
distributions they were drawn from; what is proposed never changes what the decoder writes, only how fast.
A drafter follows the decoder's rows: 0..B-1, the last taking the place of one that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .noise import Role
from .runner import ModelRunner, PrefillSteps
from .sampling import SamplingParams, argmax, draw, probabilities
from .sequence import Sequence
from .transfer import to_device
from .verify import Keys


@dataclass
class Proposal:
    """tokens int64 [B, l] on the device, counts[r] of them real; probs float32 [B, l, V], None = point masses."""

    tokens: Tensor
    counts: list[int]
    probs: Tensor | None = None


class Drafter(Protocol):
    """What a decoder asks of a drafter. `calls` counts forwards of a draft model."""

    @property
    def calls(self) -> int: ...

    def start(self, rows: list[Sequence]) -> PrefillSteps | None: ...

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal: ...

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None: ...

    def move_row(self, source: int, target: int) -> None: ...


@runtime_checkable
class StateReader(Protocol):
    """A drafter that looks at the target's states, given as the tokens they belong to are settled.

    They are what the target's step reads out (Readout in step_model.py): its last hidden states, unless the pair's
    draft head asks for others.
    """

    def read_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """states[r] [k, hidden]: of the k tokens of row r that entered the target's cache for good."""


class ModelDrafter:
    """Drafts with a second model, one forward a token, for the whole batch at once."""

    def __init__(self, runner: ModelRunner, params: SamplingParams, rule: str = "chen") -> None:
        self.runner, self.params = runner, params
        self.role = Role.TARGET if rule == "coupled" else Role.DRAFT
        self.calls = 0

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        limit = self.runner.model.context
        return self.runner.prefill([row.prompt[:limit] for row in rows])

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal:
        runner, batch = self.runner, len(rows)
        # A draft with a shorter context than the target's falls silent when a text outgrows it.
        caps = [
            max(0, min(cap, runner.model.context - len(row.tokens))) for row, cap in zip(rows, caps, strict=True)
        ]
        length = max(caps)
        if length == 0:
            return Proposal(torch.zeros(batch, 0, dtype=torch.long, device=runner.device), caps)
        pending = [row.tokens[runner.cached[r] :] if caps[r] else row.tokens[-1:] for r, row in enumerate(rows)]
        # A row that drafts nothing is fed as padding, behind its own valid tokens.
        starts = runner.cached[:batch]
        width = max(len(tokens) for tokens in pending)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in pending]
        ids = to_device(padded, runner.device)
        counts = [len(tokens) for tokens in pending]
        logits = runner.feed_ids(ids, starts, [count - 1 for count in counts], counts)
        self.calls += 1
        ends = [start + len(tokens) for start, tokens in zip(starts, pending, strict=True)]
        tokens_, probs = [], []
        for step in range(length):
            token, prob = self._draw(logits, keys, step)
            tokens_.append(token)
            probs.append(prob)
            if step + 1 < length:
                logits = runner.feed_ids(token[:, None], [end + step for end in ends])[:, 0]
                self.calls += 1
        stacked = None if probs[0] is None else torch.stack([p for p in probs if p is not None], dim=1)
        return Proposal(torch.stack(tokens_, dim=1), caps, stacked)

    def _draw(self, logits: Tensor, keys: Keys, step: int) -> tuple[Tensor, Tensor | None]:
        if self.params.greedy:
            return argmax(logits), None
        probs = probabilities(logits, self.params)
        roles = torch.full_like(keys.positions, int(self.role))
        return draw(probs, keys.seed, keys.sequence_ids, keys.positions + step, roles), probs

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """The cache holds what was fed: all but the last draft; after a full acceptance that one is missing."""
        width = proposal.tokens.shape[1]
        if width == 0:
            return
        for r, row in enumerate(rows):
            if proposal.counts[r]:
                before = len(row.tokens) - 1 - accepted[r]
                self.runner.cached[r] = before + min(accepted[r], width - 1)

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
