"""Who proposes tokens: a small model (BASS's own), or the text so far.

Contract: `propose` returns up to caps[r] tokens for each row of the batch, and, when sampling from a model, the
distributions they were drawn from; what is proposed never changes what the decoder writes, only how fast.
A drafter follows the decoder's rows: 0..B-1, the last taking the place of one that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .noise import Role
from .runner import ModelRunner, PrefillSteps
from .sampling import SamplingParams, draw, probabilities
from .sequence import Sequence
from .verify import Keys


@dataclass
class Proposal:
    """tokens int64 [B, l] on the device, counts[r] of them real; probs float32 [B, l, V], None = point masses."""

    tokens: Tensor
    counts: list[int]
    probs: Tensor | None = None


class Drafter(Protocol):
    """What a decoder asks of a drafter. `calls` counts forwards of a draft model."""

    calls: int

    def start(self, rows: list[Sequence]) -> PrefillSteps | None: ...

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal: ...

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None: ...

    def move_row(self, source: int, target: int) -> None: ...


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
        ids = torch.tensor(padded, device=runner.device)
        logits = runner.feed_ids(ids, starts, take=[len(tokens) - 1 for tokens in pending])
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
            return logits.argmax(-1), None
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


class PromptLookupDrafter:
    """Copies what followed the latest earlier occurrence of the row's last tokens (2 to `longest` of them).

    The longest match wins. Costs no forward, and shines where the answer repeats the prompt.
    """

    def __init__(self, device: torch.device, longest: int = 4, shortest: int = 2) -> None:
        self.device, self.longest, self.shortest = device, longest, shortest
        self.calls = 0
        self.tables: list[dict[tuple[int, ...], int]] = []
        self.indexed: list[int] = []

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.tables = [{} for _ in rows]
        self.indexed = [0 for _ in rows]
        return None

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal:
        found = [
            self._lookup(r, row.tokens, cap) if cap else []
            for r, (row, cap) in enumerate(zip(rows, caps, strict=True))
        ]
        counts = [len(copied) for copied in found]
        width = max(counts)
        padded = [copied + [0] * (width - len(copied)) for copied in found]
        tokens = torch.tensor(padded, dtype=torch.long, device=self.device).view(len(rows), width)
        return Proposal(tokens, counts)

    def _lookup(self, row: int, tokens: list[int], count: int) -> list[int]:
        """`count` tokens from after the latest match, or none. A match that overlaps the end repeats itself."""
        table, end = self.tables[row], len(tokens)
        for stop in range(max(self.indexed[row], 1), end):
            for size in range(self.shortest, min(self.longest, stop) + 1):
                table[tuple(tokens[stop - size : stop])] = stop
        self.indexed[row] = end
        for size in range(min(self.longest, end), self.shortest - 1, -1):
            at = table.get(tuple(tokens[end - size :]))
            if at is not None:
                return [tokens[at + i % (end - at)] for i in range(count)]
        return []

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        return None

    def move_row(self, source: int, target: int) -> None:
        self.tables[target], self.indexed[target] = self.tables[source], self.indexed[source]
