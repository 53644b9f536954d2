"""Drafts with a head that reads the target's hidden states.

Contract: a drafter as in drafters.py. Slots of settled tokens are fed with the target's own states as these arrive
(`read_states`), slots of drafted tokens with the head's; the latter are fed anew once the target has settled them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .draft_head import DraftHead
from .drafters import Proposal
from .noise import Role
from .runner import ModelRunner, PrefillSteps
from .sampling import SamplingParams, argmax, draw, probabilities
from .sequence import Sequence
from .verify import Keys

# Slots that are fed in one forward: the first proposal follows a whole prompt.
CHUNK = 128
# A forward costs more than one more token in a verification: a row goes on only where its drafts so far have this
# many times the confidence. Each row by itself, though a batch shares the forward: none depends on its neighbours.
HEADROOM = 4.0


class HeadDrafter:
    """`runner` drives the head's body over its reduced vocabulary and keeps states; `size` is the target's V.

    confidence: a row drafts on while the head gives its drafts so far, times the likeliest next token, at least
    this probability, and the drafts so far HEADROOM times it (so from 1 / HEADROOM on one draft at most). The
    token that is drawn next has no say in it, so that q stays what it is drawn from. 0: never stop; above 0 each
    drafted token synchronises with the host twice.
    """

    def __init__(
        self,
        head: DraftHead,
        runner: ModelRunner,
        size: int,
        params: SamplingParams,
        rule: str = "chen",
        confidence: float = 0.0,
    ) -> None:
        self.head, self.runner, self.size, self.params = head, runner, size, params
        self.role = Role.TARGET if rule == "coupled" else Role.DRAFT
        self.confidence = confidence
        self.calls = 0
        self._waiting: list[Tensor] = []

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        zero = torch.zeros(1, self.head.config.hidden, device=self.runner.device)
        # Slot t reads the state of t - 1, and nothing stands before the first token.
        self._waiting = [zero for _ in rows]
        return None

    def read_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        self._waiting[: len(rows)] = [
            torch.cat((waiting, new)) for waiting, new in zip(self._waiting[: len(rows)], states, strict=True)
        ]

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal:
        logits, states = self._catch_up(rows)
        ends = list(self.runner.cached[: len(rows)])
        counts = list(caps)
        sure = torch.ones(len(rows), device=logits.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(max(caps)):
            if step:
                if self.confidence:
                    counts = _stopped(counts, step, sure >= HEADROOM * self.confidence)
                    if max(counts) <= step:
                        break
                x = self.head.inputs(tokens[-1][:, None], states[:, None])
                logits = self.runner.feed_ids(x, [end + step - 1 for end in ends])[:, 0]
                states = self._states()[:, 0]
                self.calls += 1
            if self.confidence:
                q = logits.softmax(-1) if self.params.greedy else probabilities(logits, self.params)
                counts = _stopped(counts, step, sure * q.amax(-1) >= self.confidence)
                if max(counts) <= step:
                    break
            column, full = self._draw(logits, keys, step)
            if self.confidence:
                sure = sure * q.gather(1, column[:, None])[:, 0]
            tokens.append(self.head.vocabulary[column])
            if full is not None:
                probs.append(full)
        if not tokens:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=logits.device), counts)
        return Proposal(torch.stack(tokens, dim=1), counts, torch.stack(probs, dim=1) if probs else None)

    def _catch_up(self, rows: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Feed what was settled since the last proposal; logits [B, V'], states [B, hidden] of the last slots."""
        runner, batch = self.runner, len(rows)
        starts = runner.cached[:batch]
        counts = [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
        width = max(counts)
        padded = [row.tokens[start:] + [0] * width for row, start in zip(rows, starts, strict=True)]
        ids = torch.tensor([tokens[:width] for tokens in padded], device=runner.device)
        waiting = torch.zeros(batch, width, self.head.config.hidden, device=runner.device)
        for r, states in enumerate(self._waiting[:batch]):
            waiting[r, : counts[r]] = states
            self._waiting[r] = states[:0]
        x = self.head.inputs(ids, waiting)
        last: list[tuple[Tensor, Tensor]] = [(x, x)] * batch
        for start in range(0, width, CHUNK):
            stop = min(start + CHUNK, width)
            take = [min(max(count - 1 - start, 0), stop - start - 1) for count in counts]
            real = [max(1, min(count, stop) - start) for count in counts]
            logits = runner.feed_ids(x[:, start:stop], [at + start for at in starts], take, real)
            self.calls += 1
            for r, count in enumerate(counts):
                if start < count <= stop:
                    last[r] = (logits[r], self._states()[r, take[r]])
        runner.cached[:batch] = [len(row.tokens) for row in rows]
        return torch.stack([one for one, _ in last]), torch.stack([one for _, one in last])

    def _states(self) -> Tensor:
        assert self.runner.states is not None, "the runner was made to keep states"
        return self.runner.states

    def _draw(self, logits: Tensor, keys: Keys, step: int) -> tuple[Tensor, Tensor | None]:
        """A column of the head's vocabulary a row, and the distribution [B, V] over the target's."""
        if self.params.greedy:
            return argmax(logits), None
        probs = probabilities(logits, self.params)
        roles = torch.full_like(keys.positions, int(self.role))
        ids = self.head.vocabulary
        column = draw(probs, keys.seed, keys.sequence_ids, keys.positions + step, roles, ids)
        full = torch.zeros(len(probs), self.size, device=probs.device)
        return column, full.index_copy_(1, ids, probs)

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """Nothing: the slots of drafted tokens lie behind what counts, and are fed again with true states."""

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
        self._waiting[target] = self._waiting[source]


def _stopped(counts: list[int], step: int, enough: Tensor) -> list[int]:
    """`counts`, at most `step` in each row whose `enough` (bool [B]) is false."""
    return [n if ok else min(n, step) for n, ok in zip(counts, enough.tolist(), strict=True)]
