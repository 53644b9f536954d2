"""The decoding loop: regular, speculative and BASS (arXiv 2404.15778) decoding are one loop over a batch of rows.

Regular decoding is the loop without a drafter, speculative decoding the loop over batches of one (sequential.py).
A round is four calls: lengths, propose, verify, commit. It waits for the device once. The rule that judges drafts
is known before any is drawn: the tree rule if the drafter `branches`, else the chain rule.

If only results on the device decide the next round (`_needs_no_host`), the device is given that round before
this one is read, so that it doesn't wait for the host. A row whose text then ends takes part in one more round,
which is ignored. Texts and records stay the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..draft.base import GRAMMAR, CommittedStates, Drafter, Proposal, check_proposal, check_type, texts_unchanged
from ..length.base import Feedback, LengthPolicy, Offer, check_lengths
from ..length.policies import LONGEST, FixedLength
from ..machine.setup_time import setup_ms
from ..machine.stopwatch import Stopwatch
from ..machine.transfer import to_device
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.grammar import refuse_stuck
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.shaping import shaped
from ..sequence import Reading, Round, RowRound, Sequence
from ..verify.acceptance import Outcomes, mark_unsound, refuse_unsound
from ..verify.rejection import first_tokens
from .base import CacheBytes, Decoder, DecodingParams
from .record import add_details, record_logprobs, write_round
from .verifier import LaunchedRound, VerifiedRound, Verifier

# Sources whose drafts come with the distributions that they were drawn from.
DRAWS = ("head", "model")


@dataclass
class StartedRound:
    """A round that the device was given.

    Attributes:
        watch: has marks before and after drafting, and after the verification.
        began, set_up: the time and the set-up time when the round began.
        work: `_draft_work` after its drafts.
    """

    offers: list[Offer]
    lengths: list[int]
    verifying: LaunchedRound
    watch: Stopwatch
    began: float
    set_up: float
    work: tuple[int, int]


@dataclass
class BatchDecoder(Decoder):
    """Decode one batch. When a row finishes, the last row takes its place.

    Attributes:
        drafter: None for regular decoding.
        policy: sets the draft lengths; None drafts nothing.
        limit: the longest draft that fits the caches.
        return_states: whether the target's forwards return hidden states, for the drafter or another reader.
        launches_ahead: whether a round may be launched before the last one is read; a class's or a test's choice.
    """

    launches_ahead: ClassVar[bool] = True

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
        self._rows = list(self.sequences)
        self.return_states |= self.drafter is not None and self.drafter.observes_states
        self._branches = self.drafter is not None and self.drafter.branches
        raw_states = self.drafter is not None and self.drafter.raw_states
        masked = any(row.grammar is not None for row in self._rows)
        self._advances = self._needs_no_host(masked)
        if self.drafter is not None and self._advances:
            self.drafter.advances = True
        self.verifier = Verifier(
            self.target, self.params, self.return_states, raw_states, self._branches, masked, self._advances
        )
        # The round that was launched before the last one was read.
        self._next: StartedRound | None = None
        self.next_begins: Any = None
        # The draft's forwards and drawn tokens that earlier rounds have reported.
        self._reported_work = (0, 0)
        self._prefill = PrefillSteps(self.target, [row.prompt for row in self._rows], self.return_states)
        if self.drafter is not None:
            draft_prefill = self.drafter.start(self._rows)
            self._draft_prefill = draft_prefill if self._reads_prompts() else None

    @property
    def finished(self) -> bool:
        return not self._rows

    def close(self) -> None:
        self._leave_next()

    def _leave_next(self) -> None:
        """Wait for a round that was launched ahead and that nobody needs."""
        # The caches will be used again, perhaps on another stream.
        if self._next is not None and self._next.verifying.copy is not None:
            self._next.verifying.copy.wait()
        self._next = None

    def _needs_no_host(self, masked: bool) -> bool:
        """Return whether rounds may be launched before the last one is read.

        Then no decision of the host is needed in between: rows draft equally many tokens by one graph, or none.
        """
        params, drafter, policy = self.params, self.drafter, self.policy
        asks_host = params.inspect or params.logprobs or masked or params.sampling.shapes
        asks_host = asks_host or params.verification.adjust is not None
        if asks_host or not self.launches_ahead or not self.target.captures:
            return False
        if drafter is None:
            return policy is None
        can = drafter.can_advance and not drafter.is_user_object and not self._branches
        return can and type(policy) is FixedLength and 0 < policy.length <= self.limit

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
        none = [0] * len(tokens)
        rows = write_round(self._rows, Outcomes.plain(tokens, [math.nan] * len(tokens)), none)
        if self.params.logprobs:
            record_logprobs(self._rows, rows, [[0]] * len(rows), raw, logits[:, None], self.params.sampling)
        self._drop([row for row in self._rows if row.finish_reason])
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
        """Launch a round unless it was launched ahead, launch the next one if possible, then read this one."""
        launch = self._launch() if self._next is None else self._next
        # Rows that ended in the round before, and took part in this one because it had been launched.
        gone = [row for row in self._rows if row.finish_reason]
        self._next = None if gone else self._launch_ahead(launch)
        verdict = self.verifier.read(self._rows, launch.verifying)
        self.next_begins = None if self._next is None else launch.watch.last
        if gone:
            verdict = verdict._replace(staying=self._staying())
        # 4) Commit the accepted tokens to caches and texts.
        records = self._commit(verdict)
        verdict = verdict.written
        # A graph that this round captured is no cost of the rounds to come.
        round_ms = 1000 * (time.perf_counter() - launch.began) - (setup_ms() - launch.set_up)
        round_ = self._record(launch, verdict, records)
        if self.policy is not None:
            accepted, draft_ms = verdict.outcomes.accepted, round_.draft_ms or 0.0
            drafted, forwards = verdict.proposal.num_drafted, round_.draft_forwards
            feedback = Feedback(launch.offers, round_.lengths, drafted, accepted, forwards, round_ms, draft_ms)
            self.policy.observe(feedback)
        ended = [row for row in self._rows if row.finish_reason]
        if len(ended) == len(self._rows):
            self._leave_next()
        if self._next is None:
            # In the order in which the rows ended.
            self._drop(gone)
            self._drop(ended)
        return round_

    def _launch(self) -> StartedRound:
        """Give the first steps of a round to the device."""
        began, set_up, keys, watch = time.perf_counter(), setup_ms(), self._keys(), Stopwatch(self.target.device)
        # 1) Set the draft lengths, before anything is drawn.
        offers = self._offers()
        lengths = self._lengths(offers)
        watch.mark()
        # 2) Draft.
        proposal = self._propose(self._usable(lengths), keys)
        watch.mark()
        # 3) Feed the drafts to the target and judge them.
        verifying = self.verifier.launch(self._rows, proposal, keys)
        watch.mark()
        return StartedRound(offers, lengths, verifying, watch, began, set_up, self._draft_work())

    def _launch_ahead(self, last: StartedRound) -> StartedRound | None:
        """Launch the round after one that is not read yet; None if something has to be decided before."""
        if not self._advances or not self.verifier.repeats(last.verifying):
            return None
        proposal, captured, drafter = last.verifying.proposal, last.verifying.captured, self.drafter
        width = proposal.width
        # Whatever the last round writes, each row has to draft as many tokens again.
        if min(row.remaining for row in self._rows) < 2 * (width + 1) or min(proposal.num_drafted) < width:
            return None
        if drafter is not None and not drafter.repeats(self._rows, proposal):
            return None
        began, set_up, watch = time.perf_counter(), setup_ms(), Stopwatch(self.target.device)
        watch.mark()
        if drafter is not None and captured is not None:
            proposal = drafter.propose_again(proposal, captured.judged.packed, captured.output.states)
        watch.mark()
        verifying = self.verifier.launch_again(last.verifying, proposal)
        watch.mark()
        return StartedRound(last.offers, last.lengths, verifying, watch, began, set_up, self._draft_work())

    def _record(self, launch: StartedRound, verdict: VerifiedRound, records: list[RowRound]) -> Round:
        """Return the round's record. Without a policy, its lengths are the drafts that were judged."""
        proposal, drafted = verdict.proposal, verdict.proposal.num_drafted
        lengths = drafted if self.policy is None else launch.lengths[: len(records)]
        round_ = Round("verify" if max(drafted) else "plain", max(lengths), records, lengths=lengths)
        work = self._draft_work() if self._next is None else launch.work
        before, self._reported_work = self._reported_work, work
        round_.draft_forwards, round_.draft_tokens = (
            now - then for now, then in zip(self._reported_work, before, strict=True)
        )
        if len(records) < len(self._rows):
            round_.draft_tokens = sum(drafted)
        round_.fed, round_.windowed = verdict.fed, proposal.windowed
        # The sources of a user's drafter are not checked.
        if self.verifier.masked and proposal.sources and self.drafter and not self.drafter.is_user_object:
            for record, source in zip(records, proposal.sources, strict=True):
                record.certain = source == GRAMMAR and bool(record.drafted)
        draft_ms, round_.verify_ms = launch.watch.laps()
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
        if self.drafter.is_user_object:
            with texts_unchanged(self._rows):
                proposal = self.drafter.propose(self._rows, lengths, keys)
            check_proposal(proposal, lengths, self.target.vocab)
        else:
            proposal = self.drafter.propose(self._rows, lengths, keys)
        return check_type(proposal, self._branches)

    def _commit(self, verdict: VerifiedRound) -> list[RowRound]:
        """Commit the accepted tokens to the target's cache, the texts and the drafter."""
        rows, (proposal, outcomes, output, fed, raw, _) = self._rows, verdict
        self.target_forwards += 1
        columns, written = outcomes.fed_columns, verdict.written
        tokens = written.outcomes.final_tokens
        if self.verifier.masked:
            shaped_by = self.params.sampling.shapes
            refuse_stuck(rows, tokens, shaped_by, lambda r: [outcomes.drafts[r][i] for i in outcomes.path(r)])
        refuse_unsound(tokens)
        self.target.commit_paths([path[:count] for path, count in zip(columns, fed.counts, strict=True)])
        if (states := output.vectors) is not None and self._next is None:
            self._hand_states(rows, lambda: CommittedStates(states, columns))
        texts = rows if verdict.staying is None else [rows[r] for r in verdict.staying]
        records = write_round(texts, written.outcomes, written.proposal.num_drafted, proposal.tree_parents)
        if self.params.logprobs:
            logits = output.logits
            record_logprobs(rows, records, columns, logits if raw is None else raw, logits, self.params.sampling)
        if self.drafter is not None and self._next is None:
            self.drafter.on_verified(rows, proposal, outcomes.accepted)
        elif self.drafter is not None:
            self.drafter.on_repeated(rows)
        return records

    def _hand_states(self, rows: list[Sequence], states: Callable[[], Seq[Tensor]]) -> None:
        """Give the target's hidden states of the newly committed tokens to a drafter that reads states."""
        if self.drafter is not None and self.drafter.observes_states:
            committed = states()
            self.drafter.observe_states(rows, list(committed) if self.drafter.is_user_object else committed)

    def _keys(self) -> RowKeys:
        ids, positions = [row.id for row in self._rows], [len(row.tokens) for row in self._rows]
        return RowKeys(self.params.seed, ids, positions, self.target.device)

    def _staying(self) -> list[int]:
        """Return the rows whose texts have not ended, in the order in which they will be after `_drop`."""
        staying = list(range(len(self._rows)))
        for r in reversed(staying.copy()):
            if self._rows[r].finish_reason:
                staying[r] = staying[-1]
                staying.pop()
        return staying

    def _drop(self, gone: list[Sequence]) -> None:
        leaving = [row.index for row in gone]
        for r in reversed(range(len(self._rows) if leaving else 0)):
            if self._rows[r].index in leaving:
                last = len(self._rows) - 1
                self.verifier.move_row(last, r)
                if self.drafter is not None and last != r:
                    self.drafter.move_row(last, r)
                self._rows[r] = self._rows[last]
                self._rows.pop()
