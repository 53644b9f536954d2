"""Drafts from a second, smaller model, as in the BASS paper (arXiv 2404.15778): `ModelDrafter`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..length.base import Offer
from ..machine.transfer import to_device
from ..model.forward import ForwardBatch
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.noise import NoiseKeys
from ..sample.params import SamplingParams
from ..sample.shaping import changes, shaped_next
from ..sequence import Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import Drafter, Proposal, TreeProposal, no_drafts
from .chain import ChainSampler, DraftFeed, Levels
from .pending import feed_pending
from .tree import TreePlanner


class ModelDrafter(Drafter):
    """Drafts with a second model: one forward of the whole batch per token, or per level of a tree.

    Args:
        tree: shape of the trees to draft (TreePlanner). None: chains.
    """

    source = "model"
    # The draft model's columns are all of the target's ids (LevelModel in tree.py).
    vocabulary = None

    def __init__(
        self,
        runner: ModelRunner,
        params: SamplingParams,
        verification: Verification = AUTOMATIC,
        tree: tuple[int, ...] | None = None,
    ) -> None:
        self.runner, self.params = runner, params
        self.role = verification.draft_role
        self.branches = tree is not None
        self.trees = None if tree is None else TreePlanner(tree, params, self.role, runner.vocab)
        self.chains = ChainSampler(params, self.role, runner.vocab)
        self._steps: PrefillSteps | None = None

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        limit = self.runner.model.context
        self._steps = PrefillSteps(self.runner, [row.prompt[:limit] for row in rows])
        return self._steps

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer as many drafts as fit the draft model's context."""
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
        """Let the model prepare forwards of one and of two tokens per row."""
        for width in (1, 2):
            tokens = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            self.runner.prepare(ForwardBatch(tokens, [0] * rows))

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        if self._steps is not None and not self._steps.done:
            self._begin_late(rows)
        self._steps = None
        # If the draft model's context is shorter than the target's, a row that outgrows it drafts no more.
        max_drafts = [
            max(0, min(most, self.runner.model.context - len(row.tokens)))
            for row, most in zip(rows, max_drafts, strict=True)
        ]
        proposal = self._draft(rows, max_drafts, keys)
        self.drafted += sum(proposal.num_drafted)
        return proposal

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        """Return the proposal of a round."""
        if self.trees is not None:
            return self.trees.propose(self, rows, max_drafts, keys)
        if not any(max_drafts):
            return no_drafts(max_drafts, self.runner.device)
        return self.chains.propose(self.levels(rows, max_drafts), max_drafts, keys, self.report_probs)

    def levels(self, rows: list[Sequence], max_drafts: list[int]) -> Levels:
        """Read the text and yield logits; only chains have penalties and masks (LevelModel)."""
        logits, ends = self._catch_up(rows, max_drafts)
        if self.trees is not None:
            # Text tokens stay in the cache even if every draft is rejected.
            for r, end in enumerate(ends):
                if max_drafts[r]:
                    self.runner.commit(r, end)
        feed, drawn, logits = DraftFeed(self, ends), list[Tensor](), logits[:, None]
        shapes = changes(self.params, rows) and self.trees is None
        while True:
            if shapes:
                logits = shaped_next(logits[:, 0], self.params, rows, drawn)[:, None]
            level = yield logits
            drawn.append(level.tokens[:, 0])
            output = feed.feed(level.tokens, level, len(drawn) - 1)
            if output is None:
                return
            logits = output.logits

    def _begin_late(self, rows: list[Sequence]) -> None:
        """Begin in a later round than the first, with prompts that are still unread."""
        # Read shared prefixes as in a prefill, because a row has no columns for its prefix. Other prompts are read
        # together with the new text.
        self.runner.clear_rows()
        if self.runner.shared.prefixes:
            steps = PrefillSteps(self.runner, [row.prompt[: self.runner.model.context] for row in rows])
            while not steps.done:
                steps.step()
                self.calls += 1

    def _unread(self, rows: list[Sequence], max_drafts: list[int]) -> tuple[list[list[int]], list[int]]:
        """Return the tokens to feed, none of rows that don't draft, and where each row's begin."""
        # A row that drafts needs the logits after its newest token, so it feeds that token again if necessary.
        lengths = zip(rows, self.runner.lengths, max_drafts, strict=False)
        starts = [min(length, len(row.tokens) - (most > 0)) for row, length, most in lengths]
        parts = zip(rows, starts, max_drafts, strict=True)
        return [row.tokens[start:] if most else [] for row, start, most in parts], starts

    def _catch_up(self, rows: list[Sequence], max_drafts: list[int]) -> tuple[Tensor, list[int]]:
        """Return logits [B, V] after the newest tokens of the rows that draft, and where their drafts begin."""
        # The other rows feed padding.
        pending, starts = self._unread(rows, max_drafts)
        counts = [len(tokens) for tokens in pending]
        padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in pending]
        logits, _, forwards = feed_pending(self.runner, to_device(padded, self.runner.device), starts, counts)
        self.calls += forwards
        return logits, [start + max(count, 1) for start, count in zip(starts, counts, strict=True)]

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """Commit the accepted drafts, except for the last draft, which was never fed."""
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
