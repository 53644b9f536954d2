"""The decoding loop: regular, speculative and BASS are one loop over a batch of rows.

Contract: a decoder (base.py). Regular decoding is the loop without a drafter, speculative decoding the batch of
one, run row after row (sequential.py), and BASS (arXiv 2404.15778) the batch in which every row accepts its own
number of drafts. Each round waits for the device once. Clocks and texts are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..budget.policies import CommonStop, DraftLengthPolicy
from ..drafting.base import Drafter, Proposal, check_chain
from ..engine.runner import ModelRunner, PrefillSteps
from ..machine.transfer import to_device
from ..sampling.noise import NoiseKeys
from ..sequence import Round, RowRound, Sequence
from ..verification.acceptance import Outcome, mark_unsound, refuse_unsound
from ..verification.rejection import first_tokens, verify
from .base import DecodingParams, Timeline


@dataclass
class BatchDecoder:
    """One batch. `drafter` None is regular decoding. Rows that finish leave; the last takes their place."""

    sequences: list[Sequence]
    target: ModelRunner
    rules: DecodingParams
    drafter: Drafter | None = None
    policy: DraftLengthPolicy | None = None
    target_forwards: int = 0
    _prefill: PrefillSteps | None = None
    _draft_prefill: PrefillSteps | None = None
    _rows: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = list(self.sequences)
        self._prefill = self.target.prefill([row.prompt for row in self._rows])
        if self.drafter is not None:
            self._draft_prefill = self.drafter.start(self._rows)

    @property
    def finished(self) -> bool:
        return not self._rows

    @property
    def timeline(self) -> Timeline | None:
        """None: nothing overlaps."""
        return None

    def pause(self) -> None:
        """Nothing works on between steps."""

    def close(self) -> None:
        """Nothing is held beyond the decoder's own memory."""

    def prepare(self) -> None:
        """Before the first step: let the models make ready for the shapes of a plain and of the first round."""
        rows = len(self._rows)
        requested = self.policy.length if self.policy is not None else 0
        for width in sorted({1, 1 + min(requested, max(row.remaining for row in self._rows) - 1)}):
            self.target.prepare(torch.zeros(rows, width, dtype=torch.long, device=self.target.device))
        if self.drafter is not None:
            self.drafter.prepare(rows)

    @torch.inference_mode()
    def step(self) -> Round:
        """One prefill chunk or one round; the first tokens come with the last chunk."""
        if self._draft_prefill is not None and not self._draft_prefill.done:
            self._draft_prefill.step()
            return Round("prefill")
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        return self._round()

    def _prefill_step(self, prefill: PrefillSteps) -> Round:
        prefill.step()
        if not prefill.done:
            return Round("prefill")
        self.target_forwards += 1
        keys = self._keys()
        logits = prefill.logits()
        tokens = mark_unsound(first_tokens(logits, keys, self.rules.params), logits).tolist()
        refuse_unsound(tokens)
        self._hand_states(self._rows, prefill.states)
        self._prefill = self._draft_prefill = None
        rows = [self._write(row, [], [], 0, token) for row, token in zip(self._rows, tokens, strict=True)]
        self._drop_finished()
        return Round("prefill", rows=rows)

    def _round(self) -> Round:
        rows, keys = self._rows, self._keys()
        requested = self.policy.length if self.policy is not None else 0
        calls, drawn = self._draft_work()
        proposal = self._propose(requested, keys)
        counts = proposal.num_drafted
        verdict = self._verify(proposal, keys)
        self.target_forwards += 1
        accepted, next_tokens, tests, next_p = verdict.host()
        refuse_unsound(next_tokens)
        drafts = [[int(test[3]) for test in row] for row in tests]
        cut = [False] * len(rows)
        if isinstance(self.policy, CommonStop):
            cut = self.policy.cut(accepted, next_tokens, next_p, tests)
        for r, count in enumerate(accepted):
            self.target.cached[r] += count + 1
        self._hand_states(rows, lambda: [self._states()[r, : n + 1] for r, n in enumerate(accepted)])
        records = [
            self._write(row, drafts[r][: counts[r]], tests[r], accepted[r], next_tokens[r], next_p[r], cut[r])
            for r, row in enumerate(rows)
        ]
        if self.drafter is not None:
            self.drafter.on_verified(rows, proposal, accepted)
        forwards, drawn = (now - before for now, before in zip(self._draft_work(), (calls, drawn), strict=True))
        observe = getattr(self.policy, "observe", None)
        if observe is not None and self.drafter is not None:
            observe(requested, counts, accepted, forwards)
        if self.policy is not None and any(count == requested for count in counts):
            self.policy.update(accepted)
        self._drop_finished()
        return Round(
            "verify" if max(counts) else "plain", requested, records, draft_forwards=forwards, draft_tokens=drawn
        )

    def _draft_work(self) -> tuple[int, int]:
        """Forwards of a draft model so far, and tokens that it drew."""
        return (0, 0) if self.drafter is None else (self.drafter.calls, self.drafter.drafted)

    def _hand_states(self, rows: list[Sequence], states: Callable[[], list[Tensor]]) -> None:
        """Give the drafter the target's states of what was settled, if it reads them."""
        if self.drafter is not None and self.drafter.observes_states:
            self.drafter.observe_states(rows, states())

    def _states(self) -> Tensor:
        assert self.target.states is not None, "the runner was made to keep states"
        return self.target.states

    def _propose(self, requested: int, keys: NoiseKeys) -> Proposal:
        nothing = Proposal(torch.zeros(len(self._rows), 0, dtype=torch.long), [0] * len(self._rows))
        max_drafts = [min(requested, row.remaining - 1) for row in self._rows]
        if self.drafter is None or max(max_drafts) <= 0:
            return nothing
        return check_chain(self.drafter.propose(self._rows, max_drafts, keys))

    def _verify(self, proposal: Proposal, keys: NoiseKeys) -> Outcome:
        device = self.target.device
        newest = to_device([[row.tokens[-1]] for row in self._rows], device)
        drafts = to_device(proposal.tokens, device)
        logits = self.target.feed_ids(
            torch.cat((newest, drafts), dim=1),
            self.target.cached[: len(self._rows)],
            counts=[count + 1 for count in proposal.num_drafted],
        )
        verdict = verify(
            logits,
            drafts,
            proposal.probs,
            to_device(proposal.num_drafted, device),
            keys,
            self.rules.params,
            rule=self.rules.verification,
            synthetic=self.rules.synthetic,
        )
        verdict.next_token = mark_unsound(verdict.next_token, logits)
        verdict.drafts = drafts
        return verdict

    def _keys(self) -> NoiseKeys:
        device = self.target.device
        ids = to_device([row.id for row in self._rows], device)
        return NoiseKeys(self.rules.seed, ids, to_device([len(row.tokens) for row in self._rows], device))

    def _write(
        self,
        row: Sequence,
        drafted: list[int],
        tests: list[list[float]],
        accepted: int,
        next_token: int | None,
        next_p: float = math.nan,
        cut: bool = False,
    ) -> RowRound:
        """Append what was accepted and the next token: the target's own, where `cut` a draft, or none (None)."""
        last = "sampled" if not drafted else ("bonus" if accepted == len(drafted) else "recovered")
        last = "accepted" if cut else last
        own = [] if next_token is None else [next_token]
        tokens = [*drafted[:accepted], *own]
        origins = ["accepted"] * accepted + [last] * len(own)
        taken = row.write(tokens, origins)
        if taken <= accepted:
            # The text ended inside the accepted span: drafts behind its end were never tested.
            drafted, accepted = drafted[:taken], taken
        p, q, u = ([test[i] for test in tests[: len(drafted)]] for i in range(3))
        return RowRound(
            row.index, drafted, p, q, u, accepted, tokens[:taken], origins[:taken], row.finish_reason, next_p
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
