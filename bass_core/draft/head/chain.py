"""Drafts a draft head's chains or trees, level by level (`HeadDrafter`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ...length.base import Offer
from ...model.draft_head import DraftHead
from ...model.forward import ForwardBatch
from ...model.prefill import PrefillSteps
from ...sample.noise import NoiseKeys
from ...sample.params import SamplingParams
from ...sequence import Sequence
from ...verify.rules import AUTOMATIC, Verification
from ..base import Drafter, Proposal
from ..chain import ChainSampler, DraftFeed, Feed, Levels
from ..tree import TreePlanner
from .feed import HeadFeed
from .texts import append_token


class HeadDrafter(Drafter):
    """Drafts with the pair's draft head: one forward of the whole batch per token, or per level of a tree.

    Whether a row continues drafting never depends on the token that is drawn next, so each draft is distributed as
    q. The head's pointer changes the logits before a draft is drawn, so q includes it.

    Args:
        feed: the head, and the runner of its body over its reduced vocabulary.
        size: V, the size of the target's vocabulary.
        confidence: limits the drafts of a chain. Let P be the probability of its drafts so far, and p that of the
            likeliest next token. The row continues while P >= HEADROOM * confidence and P * p >= confidence.
            At 0 no row stops; above 1 / HEADROOM a row drafts at most one token.
        trees: chooses the drafts of trees. None: chains.
    """

    # Ask for raw states, so that only the states that we draft from are normalised and projected.
    observes_states, raw_states, reads_early, source = True, True, True, "head"

    def __init__(
        self,
        feed: HeadFeed,
        size: int,
        params: SamplingParams,
        verification: Verification = AUTOMATIC,
        confidence: float = 0.0,
        trees: TreePlanner | None = None,
    ) -> None:
        self.feed, self.head, self.runner, self.size = feed, feed.head, feed.runner, size
        self.params, self.role, self.vocabulary = params, verification.draft_role, feed.head.vocabulary
        self.confidence, self.trees, self.branches = confidence, trees, trees is not None
        self.chains = ChainSampler(params, self.role, size, self.vocabulary)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.runner.clear_rows()
        self.feed.start(len(rows))
        return None

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Let the body prepare forwards of one and of two tokens per row."""
        for width in (1, 2):
            ids = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            states = torch.zeros(rows, width, self.head.config.hidden, device=self.runner.device)
            self.runner.prepare(ForwardBatch(self.head.inputs(ids, states), [0] * rows, return_states=True))

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Keep copies of the target's states, whose memory its next forward overwrites."""
        self.feed.observe(states)

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts, whose states have been observed. These forwards don't count in `calls`."""
        self.feed.read_prefixes(rows)
        ends = [len(row.prompt) for row in rows]
        if any(end > start for end, start in zip(ends, self.runner.lengths, strict=False)):
            self.feed.catch_up(rows, [1] * len(rows), ends)

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer a chain for each row; `unread` leaves out the prompt, which the head reads during the prefill."""
        lengths = self.runner.lengths
        return [
            Offer(
                row.remaining - 1, self.source, unread=len(row.tokens) - max(length, len(row.prompt)), row=row.id
            )
            for row, length in zip(rows, lengths, strict=False)
        ]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        self.feed.read_prefixes(rows)
        proposal = self._draft(rows, max_drafts, keys)
        self.drafted += sum(proposal.num_drafted)
        return proposal

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        """Return the proposal of a round."""
        if self.trees is not None:
            return self.trees.propose(self, rows, max_drafts, keys)
        levels = self.levels(rows, max_drafts)
        return self.chains.propose(levels, max_drafts, keys, self.report_probs, self.confidence)

    def levels(self, rows: list[Sequence], max_drafts: list[int]) -> Levels:
        """Read the text and yield logits (LevelModel)."""
        newest, texts = self._catch_up(rows, max_drafts), self.feed.texts
        logits, states = (values[:, None] for values in newest)
        feed = DraftFeed(self, list(self.runner.lengths[: len(rows)]), return_states=True)
        last = texts.upload(rows)
        yield from head_levels(self.head, logits, states, last, texts.with_pointer, feed.feed)

    def _catch_up(self, rows: list[Sequence], max_drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Read the new tokens of the rows that draft; return logits [B, V'] and states [B, hidden] after them."""
        logits, states, forwards = self.feed.catch_up(rows, max_drafts)
        self.calls += forwards
        return logits, states

    def rewind(self, row: int, length: int) -> None:
        self.feed.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        self.feed.move_row(source, target)


def head_levels(
    head: DraftHead,
    logits: Tensor,
    states: Tensor,
    last: Tensor,
    with_pointer: Callable[[Tensor, Tensor, Tensor], Tensor],
    feed: Feed,
) -> Levels:
    """Yield a head's logits, in a graph or outside of one.

    Args:
        head: the head.
        logits, states: those after the newest tokens, [B, 1, V'] and [B, 1, hidden].
        last: int64 [B, 1, LONGEST], the last tokens of each text.
        with_pointer: as Texts.with_pointer.
        feed: feeds a level.
    """
    for depth in itertools.count():
        level = yield with_pointer(logits, states, last)
        x = head.inputs(level.tokens, level.inherit(states))
        last = append_token(level.inherit(last), level.tokens)
        output = feed(x, level, depth)
        if output is None:
            return
        logits, states = output.logits, output.require_states()
