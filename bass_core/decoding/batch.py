"""The decoding loop: regular, speculative and BASS decoding are one loop over a batch of rows.

Contract: implements Decoder (base.py). Regular decoding is the loop without a drafter. Speculative decoding is the
loop over batches of one, row after row (sequential.py). BASS (arXiv 2404.15778) is the loop over a batch in which
every row accepts its own number of drafts. Each round waits for the device once. Non-goals: clocks and texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..budget.base import Budget, Feedback
from ..drafting.base import Drafter, Proposal, check_chain
from ..engine.prefill import PrefillSteps
from ..engine.runner import ModelRunner
from ..machine.transfer import to_device
from ..models.forward import ForwardBatch, ForwardOutput
from ..sampling.noise import NoiseKeys
from ..sequence import Reading, Round, RowRound, Sequence
from ..verification.acceptance import DraftTest, Outcome, mark_unsound, refuse_unsound
from ..verification.rejection import first_tokens, verify
from ..verification.table import find_verification
from .base import CacheBytes, DecodingParams, Timeline


@dataclass
class BatchDecoder:
    """One batch. drafter: None for regular decoding. A finished row is removed; the last row takes its place."""

    sequences: list[Sequence]
    target: ModelRunner
    params: DecodingParams
    drafter: Drafter | None = None
    budget: Budget | None = None
    target_forwards: int = 0
    # Whether the target's forwards return hidden states, for the drafter or another reader.
    return_states: bool = False
    cache: CacheBytes | None = None
    _prefill: PrefillSteps | None = None
    _draft_prefill: PrefillSteps | None = None
    _rows: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = list(self.sequences)
        self.return_states |= self.drafter is not None and self.drafter.observes_states
        self._prefill = PrefillSteps(self.target, [row.prompt for row in self._rows], self.return_states)
        if self.drafter is not None:
            self._draft_prefill = self.drafter.start(self._rows)

    @property
    def finished(self) -> bool:
        return not self._rows

    @property
    def timeline(self) -> Timeline | None:
        """None: draft and target do not overlap."""
        return None

    def pause(self) -> None:
        """Does nothing: no work goes on between steps."""

    def close(self) -> None:
        """Does nothing: the decoder holds only its own memory."""

    def prepare(self) -> None:
        """Before the first step: prepare the models for the shapes of a plain round and of the first round."""
        rows = len(self._rows)
        for width in sorted({1, 1 + max(self._usable(self._requested()))}):
            tokens = torch.zeros(rows, width, dtype=torch.long, device=self.target.device)
            self.target.prepare(ForwardBatch(tokens, [0] * rows, return_states=self.return_states))
        if self.drafter is not None:
            self.drafter.prepare(rows)

    @torch.inference_mode()
    def step(self) -> Round:
        """Run one prefill chunk or one round; the last chunk also samples the first tokens."""
        if self._draft_prefill is not None and not self._draft_prefill.done:
            self._draft_prefill.step()
            return Round("prefill", reading=self._reading())
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        return self._round()

    def _prefill_step(self, prefill: PrefillSteps) -> Round:
        prefill.step()
        if not prefill.done:
            return Round("prefill", reading=self._reading())
        self.target_forwards += 1
        keys = self._keys()
        logits = prefill.logits()
        tokens = mark_unsound(first_tokens(logits, keys, self.params.sampling), logits).tolist()
        refuse_unsound(tokens)
        self._hand_states(self._rows, prefill.states)
        self._prefill = self._draft_prefill = None
        rows = [self._write(row, [], 0, token) for row, token in zip(self._rows, tokens, strict=True)]
        self._drop_finished()
        return Round("prefill", rows=rows)

    def _reading(self) -> Reading | None:
        """How far the target's prefill is; the draft's, which comes first, is not counted."""
        if self._prefill is None or not self._prefill.total:
            return None
        return Reading(self._prefill.fed, self._prefill.total, [row.index for row in self._rows])

    def _round(self) -> Round:
        rows, keys = self._rows, self._keys()
        requested, before = self._requested(), self._draft_work()
        proposal = self._propose(self._usable(requested), keys)
        num_drafted = proposal.num_drafted
        drafts = to_device(proposal.tokens, self.target.device)
        output = self._forward(drafts, num_drafted)
        outcomes = self._verify(output.logits, drafts, proposal, keys).host()
        self.target_forwards += 1
        refuse_unsound([outcome.next_token for outcome in outcomes])
        adjust = find_verification(self.params.verification).adjust
        if adjust is not None:
            outcomes = adjust(outcomes)
        accepted = [outcome.accepted for outcome in outcomes]
        for r, count in enumerate(accepted):
            self.target.commit(r, self.target.lengths[r] + count + 1)
        self._hand_states(rows, lambda: [output.require_states()[r, : n + 1] for r, n in enumerate(accepted)])
        records = [
            self._write(row, [test.token for test in outcome.tests[:count]], *outcome)
            for row, outcome, count in zip(rows, outcomes, num_drafted, strict=True)
        ]
        forwards, drawn = 0, 0
        if self.drafter is not None:
            self.drafter.on_verified(rows, proposal, accepted)
            forwards, drawn = (now - then for now, then in zip(self._draft_work(), before, strict=True))
            if self.budget is not None:
                self.budget.observe(Feedback(requested, num_drafted, accepted, forwards))
        self._drop_finished()
        kind = "verify" if max(num_drafted) else "plain"
        work = proposal.windowed
        return Round(kind, max(requested), records, draft_forwards=forwards, draft_tokens=drawn, windowed=work)

    def _requested(self) -> list[int]:
        """Number of drafts that the budget allows each row."""
        if self.budget is None:
            return [0] * len(self._rows)
        return self.budget.max_drafts([row.remaining for row in self._rows])

    def _usable(self, requested: list[int]) -> list[int]:
        """The requested numbers of drafts, cut to each row's room: the target adds one more token."""
        return [min(most, row.remaining - 1) for most, row in zip(requested, self._rows, strict=True)]

    def _draft_work(self) -> tuple[int, int]:
        """The draft model's forwards so far, and the tokens that it drew."""
        return (0, 0) if self.drafter is None else (self.drafter.calls, self.drafter.drafted)

    def _hand_states(self, rows: list[Sequence], states: Callable[[], list[Tensor]]) -> None:
        """Give the drafter, if it reads them, the target's hidden states of the newly committed tokens."""
        if self.drafter is not None and self.drafter.observes_states:
            self.drafter.observe_states(rows, states())

    def _propose(self, max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        if self.drafter is None or max(max_drafts) <= 0:
            return Proposal(torch.zeros(len(max_drafts), 0, dtype=torch.long), [0] * len(max_drafts))
        return check_chain(self.drafter.propose(self._rows, max_drafts, keys))

    def _forward(self, drafts: Tensor, num_drafted: list[int]) -> ForwardOutput:
        """The target's output for each row's newest token and the first num_drafted[r] of its drafts [B, l]."""
        newest = to_device([[row.tokens[-1]] for row in self._rows], self.target.device)
        tokens, lengths = torch.cat((newest, drafts), dim=1), self.target.lengths[: len(self._rows)]
        real = [count + 1 for count in num_drafted]
        return self.target.forward(ForwardBatch(tokens, lengths, real, return_states=self.return_states))

    def _verify(self, logits: Tensor, drafts: Tensor, proposal: Proposal, keys: NoiseKeys) -> Outcome:
        outcome = verify(
            logits,
            drafts,
            proposal.probs,
            to_device(proposal.num_drafted, logits.device),
            keys,
            self.params.sampling,
            verification=self.params.verification,
            synthetic=self.params.synthetic,
        )
        outcome.next_token = mark_unsound(outcome.next_token, logits)
        return outcome

    def _keys(self) -> NoiseKeys:
        device = self.target.device
        ids = to_device([row.id for row in self._rows], device)
        return NoiseKeys(self.params.seed, ids, to_device([len(row.tokens) for row in self._rows], device))

    def _write(
        self,
        row: Sequence,
        drafted: list[int],
        accepted: int,
        next_token: int | None,
        next_p: float = math.nan,
        tests: Seq[DraftTest] = (),
        next_drafted: bool = False,
    ) -> RowRound:
        """Append the accepted drafts and the next token, if any; parameters after `drafted`: see RowOutcome."""
        last = "sampled" if not drafted else ("bonus" if accepted == len(drafted) else "recovered")
        last = "accepted" if next_drafted else last
        own = [] if next_token is None else [next_token]
        tokens = [*drafted[:accepted], *own]
        origins = ["accepted"] * accepted + [last] * len(own)
        taken = row.write(tokens, origins)
        if taken <= accepted:
            # The text ended among the accepted drafts; the drafts after its end count as never tested.
            drafted, accepted = drafted[:taken], taken
        tests = tests[: len(drafted)]
        p, q, u = [test.p for test in tests], [test.q for test in tests], [test.u for test in tests]
        ended, chance = row.finish_reason, [test.chance for test in tests]
        return RowRound(
            row.index, drafted, p, q, u, accepted, tokens[:taken], origins[:taken], ended, next_p, chance
        )

    def _drop_finished(self) -> None:
        for r in reversed(range(len(self._rows))):
            if self._rows[r].finish_reason:
                last = len(self._rows) - 1
                self.target.move_row(last, r)
                if self.drafter is not None and last != r:
                    self.drafter.move_row(last, r)
                self._rows[r] = self._rows[last]
                self._rows.pop()
