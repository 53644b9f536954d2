"""Drafts a draft head's chains level by level (`HeadDrafter`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ...length.base import Offer
from ...machine.transfer import to_device
from ...model.forward import ForwardBatch
from ...model.prefill import PrefillSteps
from ...sample.distribution import argmax, largest, probabilities, scatter_columns
from ...sample.draw import draw
from ...sample.noise import NoiseKeys
from ...sample.params import SamplingParams
from ...sample.rows import stack
from ...sequence import Sequence
from ...verify.rules import AUTOMATIC, Verification
from ..base import Drafter, GreedyProbs, Proposal, no_drafts
from ..tree import TreePlanner
from .feed import HeadFeed
from .texts import append_token

# A row continues drafting only while the probability of its drafts is at least this many times `confidence`,
# because a forward of the head costs more than one more token in a verification. No row depends on other rows
# here.
HEADROOM = 4.0
# Under greedy decoding, the confidence of a draft is its probability at temperature 1.
_PLAIN = SamplingParams(temperature=1.0)


class HeadDrafter(Drafter):
    """Drafts chains with the pair's draft head: one forward of the whole batch per token.

    Whether a row continues drafting never depends on the token that is drawn next, so each draft is distributed as
    q. The head's pointer changes the logits before a draft is drawn, so q includes it.

    Args:
        feed: the head, and the runner of its body over its reduced vocabulary.
        size: V, the size of the target's vocabulary.
        confidence: limits the drafts of a row. Let P be the probability of the row's drafts so far, and p that of
            the likeliest next token. The row continues while P >= HEADROOM * confidence and P * p >= confidence.
            At 0 no row stops; above 1 / HEADROOM a row drafts at most one token.
        trees: chooses the drafts of trees, for subclasses that draft them.
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
        self.params, self.role = params, verification.draft_role
        self.confidence, self.trees = confidence, trees

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
        logits, states = self._catch_up(rows, max_drafts)
        last = self.feed.texts.upload(rows)
        ends = list(self.runner.lengths[: len(rows)])
        # allowed[step][r]: whether row r may draft in this step. The next lines make, per row: whether it still
        # drafts, its number of drafts, and their joint probability.
        allowed = [[most > step for most in max_drafts] for step in range(1 + max(max_drafts))]
        may_draft = to_device(allowed, logits.device)
        active, drafted = may_draft[0], torch.zeros_like(may_draft[0], dtype=torch.long)
        chain_prob = torch.ones(len(rows), device=logits.device)
        tokens, probs = list[Tensor](), list[Tensor]()
        greedy_probs = GreedyProbs(self.report_probs and self.params.greedy)
        for step in range(max(max_drafts)):
            if step:
                active = active & may_draft[step]
                if self.confidence:
                    active = active & (chain_prob >= HEADROOM * self.confidence)
                    if not active.any():
                        break
                logits, states = self._go_on(tokens[-1], states, [end + step - 1 for end in ends])
                last = append_token(last, tokens[-1][:, None])
            logits = self.feed.texts.with_pointer(logits[:, None], states[:, None], last)[:, 0]
            q = self._distribution(logits)
            if q is not None and self.confidence:
                active = active & (chain_prob * largest(q)[1] >= self.confidence)
                if not active.any():
                    break
            column = self._draw(logits, q, keys, step)
            if q is not None and self.confidence:
                chain_prob = chain_prob * q.gather(1, column[:, None])[:, 0]
                drafted += active
            tokens.append(self.head.vocabulary[column])
            greedy_probs.keep(logits, column)
            if q is not None and not self.params.greedy:
                probs.append(q)
        num_drafted = drafted.tolist() if self.confidence else list(max_drafts)
        if not (width := max(num_drafted)):
            return no_drafts(num_drafted, logits.device)
        full = None
        if probs:
            full = scatter_columns(stack(probs[:width]), self.head.vocabulary, self.size).transpose(0, 1)
        drafts = torch.stack(tokens[:width], dim=1)
        return Proposal(drafts, num_drafted, full, greedy_probs=greedy_probs.getter(width))

    def _catch_up(self, rows: list[Sequence], max_drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Read the new tokens of the rows that draft; return logits [B, V'] and states [B, hidden] after them."""
        logits, states, forwards = self.feed.catch_up(rows, max_drafts)
        self.calls += forwards
        return logits, states

    def _go_on(self, tokens: Tensor, states: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Feed draft tokens [B] at positions `starts`, given the previous states [B, hidden]."""
        x = self.head.inputs(tokens[:, None], states[:, None])
        output = self.runner.forward(ForwardBatch(x, starts, return_states=True))
        self.calls += 1
        return output.logits[:, -1], output.require_states()[:, -1]

    def _distribution(self, logits: Tensor) -> Tensor | None:
        """Return q [B, V'] over the head's vocabulary, or None if neither the draw nor the proposal needs it."""
        if self.params.greedy:
            return probabilities(logits, _PLAIN) if self.confidence else None
        return probabilities(logits, self.params)

    def _draw(self, logits: Tensor, q: Tensor | None, keys: NoiseKeys, step: int) -> Tensor:
        """Draw or choose each row's next draft. Return its column in the head's vocabulary, int64 [B]."""
        if self.params.greedy or q is None:
            return argmax(logits)
        streams, ids = keys.stream(self.role), self.head.vocabulary
        return draw(q, keys.seed, keys.sequence_ids, keys.positions + step, streams, ids)

    def rewind(self, row: int, length: int) -> None:
        self.feed.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        self.feed.move_row(source, target)
