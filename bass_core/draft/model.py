"""Drafts with a second, smaller model: BASS's own way (arXiv 2404.15778).

Contract: a drafter (draft/base.py) that runs one forward a drafted token, for the whole batch at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..length.base import Offer
from ..machine.transfer import to_device
from ..model.forward import ForwardBatch
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import argmax, compiled, probabilities
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role
from ..sample.params import SamplingParams
from ..sample.rows import stack
from ..sample.shaping import shaped_next
from ..sequence import Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import Drafter, OwnChances, Proposal, TreeProposal
from .pending import feed_pending
from .tree import Fed, StaticTrees, TreeFeed


class ModelDrafter(Drafter):
    """Drafts with a second model, one forward a token, for the whole batch at once.

    tree: makes trees of this shape (StaticTrees), one forward a level.
    """

    source = "model"

    def __init__(
        self,
        runner: ModelRunner,
        params: SamplingParams,
        verification: Verification = AUTOMATIC,
        tree: tuple[int, ...] | None = None,
    ) -> None:
        self.runner, self.params = runner, params
        self.role = verification.draft_role
        self.branches, self._trees = tree is not None, StaticTrees(tree or (), params, self.role, runner.vocab)
        self._feed = TreeFeed(runner, [0])
        self._steps: PrefillSteps | None = None

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        limit = self.runner.model.context
        self._steps = PrefillSteps(self.runner, [row.prompt[:limit] for row in rows])
        return self._steps

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """What fits the model's own context."""
        context, lengths = self.runner.model.context, self.runner.lengths
        return [
            Offer(
                min(row.remaining - 1, context - len(row.tokens)),
                self.source,
                unread=len(row.tokens) - length,
                row=row.id,
            )
            for row, length in zip(rows, lengths, strict=False)
        ]

    def prepare(self, rows: int) -> None:
        """Before the first step: let the model make ready for one token a row, and for two."""
        for width in (1, 2):
            tokens = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            self.runner.prepare(ForwardBatch(tokens, [0] * rows))

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        runner, batch = self.runner, len(rows)
        if self._steps is not None and not self._steps.done:
            # Nobody wanted drafts so far: the prompts are read with what was written since.
            runner.begin()
        self._steps = None
        # A draft model with a shorter context than the target's stops drafting when a text outgrows it.
        max_drafts = [
            max(0, min(most, runner.model.context - len(row.tokens)))
            for row, most in zip(rows, max_drafts, strict=True)
        ]
        if self.branches:
            proposal = self._trees.propose(self, rows, max_drafts, keys)
            self.drafted += sum(proposal.num_drafted)
            return proposal
        length = max(max_drafts)
        self.drafted += sum(max_drafts)
        if length == 0:
            return Proposal(torch.zeros(batch, 0, dtype=torch.long, device=runner.device), max_drafts)
        logits, ends = self._catch_up(rows, [most > 0 for most in max_drafts])
        own = OwnChances(self.tells and self.params.greedy)
        drawn: list[Tensor] = []
        probs: list[Tensor] = []
        # Drafts before rows, so that each level is written where it stays.
        full = None
        if not self.params.greedy and compiled(logits):
            full = torch.empty(length, *logits.shape, dtype=torch.float32)
        for step in range(length):
            if self.params.shapes:
                logits = shaped_next(logits, self.params, rows, drawn)
            out = None if full is None else full[step]
            token, prob = draw_draft(logits, self.params, keys, step, self.role, out)
            own.keep(logits, token)
            drawn.append(token)
            probs += [] if prob is None else [prob]
            if step + 1 < length:
                fed = ForwardBatch(token[:, None], [end + step for end in ends])
                logits = runner.forward(fed).logits[:, 0]
                self.calls += 1
        if full is None and probs:
            full = stack(probs)
        stacked = None if full is None else full.transpose(0, 1)
        return Proposal(torch.stack(drawn, dim=1), max_drafts, stacked, own=own.own(length))

    def _catch_up(self, rows: list[Sequence], drafts: list[bool]) -> tuple[Tensor, list[int]]:
        """Logits [B, V] after the newest tokens of the rows that draft, and where their drafts begin."""
        # A row that drafts feeds its newest token, if need be again, for the logits after it; the others padding.
        runner = self.runner
        starts = [min(runner.lengths[r], len(row.tokens) - drafts[r]) for r, row in enumerate(rows)]
        pending = [rows[r].tokens[start:] if drafts[r] else [] for r, start in enumerate(starts)]
        counts = [len(tokens) for tokens in pending]
        padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in pending]
        logits, _, forwards = feed_pending(runner, to_device(padded, runner.device), starts, counts)
        self.calls += forwards
        return logits, [start + max(count, 1) for start, count in zip(starts, counts, strict=True)]

    @property
    def vocabulary(self) -> None:
        """All of the target's ids."""
        return None

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Logits [B, V] after the newest tokens (LevelModel in tree.py)."""
        logits, ends = self._catch_up(rows, wanted)
        # What was fed of the text counts, whatever becomes of the drafts.
        for r, end in enumerate(ends):
            if wanted[r]:
                self.runner.commit(r, end)
        self._feed = TreeFeed(self.runner, ends)
        return logits

    def level(self, drafts: list[Fed], tokens: Tensor) -> Tensor:
        """Logits [B, W, V] after these drafts."""
        self.calls += 1
        return self.runner.forward(self._feed.batch(drafts, tokens)).logits

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        return self._feed.room

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """The last draft was never fed, so after a full acceptance the cache lacks it."""
        width = proposal.tokens.shape[1]
        if width == 0 or isinstance(proposal, TreeProposal):
            return
        for r, row in enumerate(rows):
            if proposal.num_drafted[r]:
                before = len(row.tokens) - 1 - accepted[r]
                self.runner.commit(r, before + min(accepted[r], width - 1))

    def rewind(self, row: int, length: int) -> None:
        self.runner.commit(row, min(self.runner.lengths[row], length))

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)


def draw_draft(
    logits: Tensor, params: SamplingParams, keys: NoiseKeys, step: int, role: Role, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The draft int64 [B] for logits [B, V] at position `step` of a round, and its q float32 [B, V] if drawn.

    out: see `probabilities`.
    """
    if params.greedy:
        return argmax(logits), None
    probs = probabilities(logits, params, out)
    return draw(probs, keys.seed, keys.sequence_ids, keys.positions + step, keys.stream(role)), probs
