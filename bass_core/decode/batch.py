"""The decoding loop: regular, speculative and BASS (arXiv 2404.15778) decoding are one loop over a batch of rows.

Regular decoding is the loop without a drafter, speculative decoding the loop over batches of one (sequential.py).
A round is four calls: lengths, propose, verify, commit. It waits for the device once. The rule that judges drafts
is known before any is drawn: the tree rule if the drafter `branches`, else the chain rule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..draft.base import GRAMMAR, CommittedStates, Drafter, Proposal, check_proposal, check_type
from ..length.base import Feedback, LengthPolicy, Offer, check_lengths
from ..length.policies import LONGEST
from ..machine.setup_time import setup_ms
from ..machine.stopwatch import Stopwatch
from ..machine.transfer import to_device
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.grammar import refuse_stuck
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.shaping import shaped
from ..sequence import Reading, Round, RowRound, Sequence
from ..verify.acceptance import RowOutcome, mark_unsound, refuse_unsound
from ..verify.rejection import first_tokens
from .base import CacheBytes, Decoder, DecodingParams
from .record import add_details, record_logprobs, write_round
from .verifier import VerifiedRound, Verifier

# Sources whose drafts come with the distributions that they were drawn from.
DRAWS = ("head", "model")


@dataclass
class BatchDecoder(Decoder):
    """Decode one batch. When a row finishes, the last row takes its place.

    Attributes:
        drafter: None for regular decoding.
        policy: sets the draft lengths; None drafts nothing.
        limit: the longest draft that fits the caches.
        return_states: whether the target's forwards return hidden states, for the drafter or another reader.
    """

    sequences: list[Sequence]
    target: ModelRunner
    params: DecodingParams
    drafter: Drafter | None = None
    policy: LengthPolicy | None = None
    limit: int = LONGEST
    target_forwards: int = 0
    return_states: bool = False
    cache: CacheBytes | None = None
    _prefill: PrefillSteps | None = None
    _draft_prefill: PrefillSteps | None = None
    _rows: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.target.device)
        self._rows = list(self.sequences)
        self.return_states |= self.drafter is not None and self.drafter.observes_states
        self._branches = self.drafter is not None and self.drafter.branches
        raw_states = self.drafter is not None and self.drafter.raw_states
        masked = any(row.grammar is not None for row in self._rows)
        self.verifier = Verifier(self.target, self.params, self.return_states, raw_states, self._branches, masked)
        # The draft's forwards and drawn tokens that earlier rounds have reported.
        self._reported_work = (0, 0)
        self._prefill = PrefillSteps(self.target, [row.prompt for row in self._rows], self.return_states)
        if self.drafter is not None:
            draft_prefill = self.drafter.start(self._rows)
            self._draft_prefill = draft_prefill if self._reads_prompts() else None

    @property
    def finished(self) -> bool:
        return not self._rows

    def prepare(self) -> None:
        """Capture all rounds of chains that the policy may want; for trees, plain rounds and the first one."""
        batch, drafter = len(self._rows), self.drafter
        limit = 0 if self.policy is None else min(self.limit, self.policy.limit)
        soft = not self.params.sampling.greedy and drafter is not None and drafter.source in DRAWS
        # Only the drafter knows how wide a tree step is.
        for rows, level in self.target.captured_rounds(batch, 0 if self._branches else limit):
            # Under grammars, all drafts of a round may be forced.
            for drawn in {soft, soft and not self.verifier.masked}:
                self.verifier.prepare(self._rows[:rows], 1 + level, drawn, drafter is not None and drafter.merges)
        if drafter is None:
            return
        drafter.prepare(batch)
        if self._branches:
            longest = max(self._usable(self._lengths(self._offers())))
            rounds = [(batch, longest)]
        else:
            rounds = self.target.captured_rounds(batch, limit)
        for rows, level in rounds:
            drafter.prepare_chains(rows, level)

    @torch.inference_mode()
    def step(self) -> Round:
        """Run one prefill chunk or one round; the last chunk also samples the first tokens."""
        if self._draft_prefill is not None and not self._draft_prefill.done:
            self._draft_prefill.step()
            fed = replace(self._draft_prefill.newest, draft=True)
            return Round("prefill", reading=self._reading(), fed=fed)
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        return self._round()

    @torch.inference_mode()
    def look_ahead(self) -> tuple[Proposal, Tensor]:
        """Return a proposal and the target's logits [B, 1 + N, V] over it, as in the next round; commit nothing.

        The logits are valid until the target's next forward. Call it after the prefill.
        """
        proposal = self._propose(self._usable(self._lengths(self._offers())), self._keys())
        drafts = to_device(proposal.tokens, self.target.device)
        output = self.verifier.feed(self._rows, proposal, drafts)
        return proposal, shaped(output.logits, self.params.sampling, self._rows, drafts, proposal.tree_parents)

    def _prefill_step(self, prefill: PrefillSteps) -> Round:
        prefill.step()
        if not prefill.done:
            return Round("prefill", reading=self._reading(), fed=prefill.newest)
        self.target_forwards += 1
        keys = self._keys()
        raw = prefill.logits()[:, None]
        logits = shaped(raw, self.params.sampling, self._rows)[:, 0]
        tokens = mark_unsound(first_tokens(logits, keys, self.params.sampling), logits).tolist()
        refuse_stuck(self._rows, tokens, self.params.sampling.shapes)
        refuse_unsound(tokens)
        self._hand_states(self._rows, prefill.states)
        self._prefill = self._draft_prefill = None
        outcomes = [RowOutcome(0, token, math.nan, []) for token in tokens]
        rows = [write_round(row, outcome) for row, outcome in zip(self._rows, outcomes, strict=True)]
        if self.params.logprobs:
            record_logprobs(self._rows, rows, [[] for _ in rows], raw, logits[:, None], self.params.sampling)
        self._drop_finished()
        if self.drafter is not None:
            if self._rows and self._reads_prompts():
                self.drafter.read(self._rows)
            self._reported_work = self._draft_work()
        return Round("prefill", rows=rows, fed=prefill.newest)

    def _reading(self) -> Reading | None:
        """Return the progress of the target's prefill. The draft's earlier prefill is not included."""
        if self._prefill is None or not self._prefill.total:
            return None
        return Reading(self._prefill.fed, self._prefill.total, [row.index for row in self._rows])

    def _round(self) -> Round:
        """Run one round in numbered steps, then update the policy and record the round."""
        began, set_up, keys = time.perf_counter(), setup_ms(), self._keys()
        # 1) Set the draft lengths, before anything is drawn.
        offers = self._offers()
        lengths = self._lengths(offers)
        self._watch.mark()
        # 2) Draft.
        proposal = self._propose(self._usable(lengths), keys)
        self._watch.mark()
        # 3) Feed the drafts to the target and judge them.
        verdict = self.verifier.verify(self._rows, proposal, keys)
        self._watch.mark()
        # 4) Commit the accepted tokens to caches and texts.
        records = self._commit(verdict)
        # A graph that this round captured is no cost of the rounds to come.
        round_ms = 1000 * (time.perf_counter() - began) - (setup_ms() - set_up)
        round_ = self._record(lengths, verdict, records)
        if self.policy is not None:
            accepted, draft_ms = [outcome.accepted for outcome in verdict.outcomes], round_.draft_ms or 0.0
            drafted, forwards = verdict.proposal.num_drafted, round_.draft_forwards
            self.policy.observe(Feedback(offers, lengths, drafted, accepted, forwards, round_ms, draft_ms))
        self._drop_finished()
        return round_

    def _record(self, lengths: list[int], verdict: VerifiedRound, records: list[RowRound]) -> Round:
        """Return the round's record. Without a policy, its lengths are the drafts that were judged."""
        proposal, drafted = verdict.proposal, verdict.proposal.num_drafted
        lengths = drafted if self.policy is None else lengths
        round_ = Round("verify" if max(drafted) else "plain", max(lengths), records, lengths=lengths)
        before, self._reported_work = self._reported_work, self._draft_work()
        round_.draft_forwards, round_.draft_tokens = (
            now - then for now, then in zip(self._reported_work, before, strict=True)
        )
        round_.fed, round_.windowed = verdict.fed, proposal.windowed
        # The sources of a user's drafter are not checked.
        if self.verifier.masked and proposal.sources and self.drafter and not self.drafter.is_user_object:
            for record, source in zip(records, proposal.sources, strict=True):
                record.certain = source == GRAMMAR and bool(record.drafted)
        draft_ms, round_.verify_ms = self._watch.laps()
        round_.draft_ms = draft_ms if round_.draft_forwards or max(drafted) else 0.0
        if self.params.inspect and max(drafted):
            source = Drafter.source if self.drafter is None else self.drafter.source
            round_.explain = partial(add_details, records, verdict, source, self.params)
        return round_

    def _offers(self) -> list[Offer]:
        return [] if self.drafter is None else self.drafter.offers(self._rows)

    def _lengths(self, offers: list[Offer]) -> list[int]:
        """Return the draft length (for a tree: its depth) that the policy allows each row."""
        if self.policy is None:
            return [0] * len(self._rows)
        return check_lengths(self.policy.lengths(offers), offers, min(self.limit, self.policy.limit))

    def _reads_prompts(self) -> bool:
        """Return whether the draft reads the prompts during the prefill, which is no part of the decoding time."""
        # A draft model takes as long for the prompts as for many rounds, so it reads them only if the first round
        # drafts. A policy that decides by cost counts the time (`Offer.unread`), then or in a later round. A draft
        # head reads early, since one layer takes less time than the target's own prefill. Otherwise only a policy
        # that tries drafts later would pay for the prompts while it decodes.
        if self.drafter is None or self.policy is None:
            return False
        if self.drafter.reads_early and self.policy.limit > 0:
            return any(row.remaining > 1 for row in self._rows)
        offers = self._offers()
        return any(most > 0 and offer.forwards for most, offer in zip(self._lengths(offers), offers, strict=True))

    def _usable(self, lengths: list[int]) -> list[int]:
        """Limit each row's length to its remaining tokens minus one, because the target adds a token."""
        return [min(most, row.remaining - 1) for most, row in zip(lengths, self._rows, strict=True)]

    def _draft_work(self) -> tuple[int, int]:
        """Return the number of forwards of the draft model so far, and of the tokens that it drew."""
        return (0, 0) if self.drafter is None else (self.drafter.calls, self.drafter.drafted)

    def _propose(self, lengths: list[int], keys: NoiseKeys) -> Proposal:
        """Return the drafter's proposal for these lengths, of the type that its rule judges."""
        if self.drafter is None or max(lengths) <= 0:
            return Proposal(torch.zeros(len(lengths), 0, dtype=torch.long), [0] * len(lengths))
        proposal = self.drafter.propose(self._rows, lengths, keys)
        if self.drafter.is_user_object:
            check_proposal(proposal, lengths, self.target.vocab)
        return check_type(proposal, self._branches)

    def _commit(self, verdict: VerifiedRound) -> list[RowRound]:
        """Commit the accepted tokens to the target's cache, the texts and the drafter."""
        rows, (proposal, outcomes, output, fed, raw) = self._rows, verdict
        self.target_forwards += 1
        tokens = [outcome.next_token if outcome.ends else 0 for outcome in outcomes]
        paths = [outcome.accepted_drafts for outcome in outcomes]
        if self.verifier.masked:
            shaped_by = self.params.sampling.shapes
            refuse_stuck(rows, tokens, shaped_by, lambda r: [outcomes[r].tests[i].token for i in paths[r]])
        refuse_unsound(tokens)
        # Column 0 of the fed tokens is the newest token; draft i is in column i + 1.
        columns = ([0, *(draft + 1 for draft in path)] for path in paths)
        self.target.commit_paths([path[:count] for path, count in zip(columns, fed.counts, strict=True)])
        if (states := output.vectors) is not None:
            self._hand_states(rows, lambda: CommittedStates(states, paths))
        parents: Seq[Any] = proposal.tree_parents or [None] * len(rows)
        judged = zip(rows, outcomes, proposal.num_drafted, parents, strict=True)
        records = [write_round(*arguments) for arguments in judged]
        if self.params.logprobs:
            logits = output.logits
            record_logprobs(rows, records, paths, logits if raw is None else raw, logits, self.params.sampling)
        if self.drafter is not None:
            self.drafter.on_verified(rows, proposal, [outcome.accepted for outcome in outcomes])
        return records

    def _hand_states(self, rows: list[Sequence], states: Callable[[], Seq[Tensor]]) -> None:
        """Give the target's hidden states of the newly committed tokens to a drafter that reads states."""
        if self.drafter is not None and self.drafter.observes_states:
            committed = states()
            self.drafter.observe_states(rows, list(committed) if self.drafter.is_user_object else committed)

    def _keys(self) -> RowKeys:
        ids, positions = [row.id for row in self._rows], [len(row.tokens) for row in self._rows]
        return RowKeys(self.params.seed, ids, positions, self.target.device)

    def _drop_finished(self) -> None:
        for r in reversed(range(len(self._rows))):
            if self._rows[r].finish_reason:
                last = len(self._rows) - 1
                self.verifier.move_row(last, r)
                if self.drafter is not None and last != r:
                    self.drafter.move_row(last, r)
                self._rows[r] = self._rows[last]
                self._rows.pop()
