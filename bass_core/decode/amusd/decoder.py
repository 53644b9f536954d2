"""AMUSD (arXiv 2410.17375): draft and target work at the same time; batched, and with sampling. See `make_amusd`.

The draft (session.py) keeps drafting in its own thread, up to `lead` tokens beyond those being verified. If one
more draft arrives during a verification (the *late* draft), the target's logits after the last token that it was
fed judge it too.

The text keeps the target's distribution by the usual rules (verify/rejection.py). Block verification judges a
round's drafts and the late draft as one block. An epoch continues only if the whole block is accepted, so no
uniform number u is used twice.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ...draft.base import Proposal
from ...errors import RequestError
from ...length.options import fixed_length
from ...machine.transfer import to_device
from ...model.draft_head import DraftHead
from ...model.forward import ForwardOutput
from ...model.graphs import runner_for
from ...model.pair import ModelPair
from ...model.prefill import PrefillSteps
from ...model.runner import ModelRunner
from ...model.weights.placement import is_split
from ...sample.noise import NoiseKeys, RowKeys
from ...sample.rows import pick, stack
from ...sequence import Round, RowRound, Sequence
from ..base import DecodingParams, cache_bytes
from ..batch import BatchDecoder, StartedRound
from ..checks import refuse_states
from ..request import Request
from ..verifier import VerifiedRound
from .draft import DraftThread, split_threads, wait_for_stream
from .session import DraftSession, QueuedDraft, StepTimes, asks_q, draft_source, sure_drafts
from .timeline import Timeline

# For tests: maximum random delay in seconds before each step of the target and of the draft.
DELAYS = (0.0, 0.0)


def make_amusd(
    pair: ModelPair, request: Request, params: DecodingParams, sequences: list[Sequence]
) -> AmusdDecoder:
    """Return the decoder of a request, with its draft started; raises RequestError if AMUSD can't answer it."""
    refuse_amusd(pair, request)
    lead, kind = lead_of(request), request.kind
    runner = runner_for(pair.target_step, len(sequences), request.texts(lead + 2), pair.vocab, request.backend)
    source, draft = draft_source(pair), DraftThread(sequences)
    rows, lock = list(draft.rows.values()), draft.lock

    def make() -> DraftSession:
        # While `lead` drafts are verified, the draft makes the late one and the next `lead`.
        return DraftSession(source, rows, params, 2 * lead + 1, kind, request.backend, pair.device, lock)

    unsure, states = kind.stops_when_unsure, isinstance(pair.draft, DraftHead)
    decoder = AmusdDecoder(sequences, runner, params, draft, lead, unsure, states)
    draft.start(make, pair.device, source.device, DELAYS[1])
    decoder.cache = cache_bytes(runner, None if draft.session is None else draft.session.runner)
    return decoder


class AmusdDecoder(BatchDecoder):
    """The target's side. A round feeds each row the drafts ahead of it, at most `lead` tokens.

    If the draft fails, the lane continues as regular decoding, and `timeline.note` explains it.

    Attributes:
        draft: the draft's thread.
        unsure: whether to leave out drafts after an unsure one.
    """

    launches_ahead = False

    def __init__(
        self,
        sequences: list[Sequence],
        target: ModelRunner,
        params: DecodingParams,
        draft: DraftThread,
        lead: int,
        unsure: bool,
        return_states: bool,
    ) -> None:
        # AMUSD's rounds have no details.
        super().__init__(sequences, target, replace(params, inspect=False), return_states=return_states)
        self.draft, self.lead, self.unsure = draft, lead, unsure
        # End the draft's thread even if the decoder is deleted without `close`.
        weakref.finalize(self, draft.end)
        # By row index: the drafts after the row's text that `DraftThread.look` last returned.
        self._ahead: dict[int, list[QueuedDraft]] = {}
        self._split, self._step_times = not is_accelerator(target.device), StepTimes()

    @property
    def timeline(self) -> Timeline:
        return self.draft.timeline

    def step(self) -> Round:
        """Run one prefill chunk or one round; the draft keeps drafting afterwards, until `pause`."""
        with self._slice():
            self.draft.resume()
            return super().step()

    def pause(self) -> None:
        """Stop the draft while another lane runs. Waiting for its running step counts as this lane's time."""
        with self._slice():
            self.draft.pause()

    def close(self) -> None:
        try:
            self.pause()
            self.timeline.waiting = 0
        finally:
            self.draft.close()

    @contextmanager
    def _slice(self) -> Iterator[None]:
        """Run the lane's clock in this block. On a CPU, the target gets only its share of the cores meanwhile."""
        before, num_threads = torch.get_num_threads(), split_threads()[0]
        split = self._split and self.draft.alive and num_threads != before
        try:
            if split:
                torch.set_num_threads(num_threads)
            with self.timeline.slice():
                yield
        finally:
            if split:
                torch.set_num_threads(before)

    def _prefill_step(self, prefill: PrefillSteps) -> Round:
        rows, begin = list(self._rows), time.perf_counter()
        round_ = super()._prefill_step(prefill)
        self.timeline.add_target(begin, time.perf_counter())
        if prefill.done:
            no_states: list[Any] = [None] * len(rows)
            states = [row_states.clone() for row_states in prefill.states()] if self.return_states else no_states
            wait_for_stream(self.target.device)
            for row, record, row_states in zip(rows, round_.rows, states, strict=True):
                self.draft.agree(row, record.tokens, False, row_states)
        return round_

    def _keys(self) -> RowKeys:
        """Return the round's noise keys, with the epochs of the rows."""
        keys = super()._keys()
        if self._prefill is None:
            keys.epochs = to_device([self.draft.rows[row.index].begin for row in self._rows], self.target.device)
        return keys

    def _draft_work(self) -> tuple[int, int]:
        return self.draft.forwards, self.draft.drawn

    def _propose(self, lengths: list[int], keys: NoiseKeys) -> Proposal:
        """Return the drafts that have arrived, however many; waits for more while that pays."""
        counts = self._counts()
        self._began = time.perf_counter()
        if DELAYS[0]:
            time.sleep(random.random() * DELAYS[0])
        return _Arrived(self._drafts(counts), counts, decoder=self)

    def with_late_drafts(self, fed: list[int], output: ForwardOutput) -> Proposal:
        """Return the drafts to judge after the target was fed fed[r] of them: those, and late ones."""
        if output.states is not None:
            # Copy the states for a draft that reads them, because the next forward may overwrite them.
            output.vectors = output.states.clone()
        # Wait, because the draft's stream may read these results. A late draft may arrive meanwhile.
        wait_for_stream(self.target.device)
        counts, logits = self._tested_counts(fed), output.logits
        width = max(counts)
        if width == logits.shape[1]:
            # There are no logits after a late draft. `verify` needs a column there but does not use it, so repeat
            # the last one.
            rows, columns = len(logits), [*range(width), width - 1]
            places = [r for r in range(rows) for _ in columns], columns * rows
            output.logits = pick(logits, *places).view(rows, width + 1, -1)
        q = self._q(width, logits) if width and asks_q(self.params) else None
        return Proposal(self._drafts(counts), counts, q)

    def _commit(self, verdict: VerifiedRound) -> list[RowRound]:
        """Commit the round, and hand the rows' new tokens to the draft."""
        end = time.perf_counter()
        rows, fed, tested = list(self._rows), [n - 1 for n in verdict.fed.counts], verdict.proposal.num_drafted
        # A row whose late draft was accepted gets no token of the target, because there are no logits after it.
        accepted = verdict.outcomes.accepted
        outcomes = replace(verdict.outcomes, ends=[n <= count for n, count in zip(accepted, fed, strict=True)])
        # Rules that judge draft by draft reach the late draft only if all drafts before it are accepted.
        samples = self.params.synthetic is None and not self.params.sampling.greedy
        together = samples and self.params.verification.together
        reached = [
            n if together or outcome.accepted >= count else min(count, n)
            for n, outcome, count in zip(tested, outcomes, fed, strict=True)
        ]
        proposal = replace(verdict.proposal, num_drafted=reached)
        records = super()._commit(verdict._replace(proposal=proposal, outcomes=outcomes))
        self.timeline.add_target(self._began, end)
        self._step_times.measure(1000 * (end - self._began), plain=not max(fed))
        states = verdict.output.states
        for r, (row, record, outcome) in enumerate(zip(rows, records, outcomes, strict=True)):
            self.timeline.looked_at += len(record.drafted)
            self._step_times.count(record.accepted, len(record.drafted))
            row_states = None if states is None else states[r, : min(outcome.accepted, fed[r]) + 1]
            self.draft.agree(row, record.tokens, not outcome.ends, row_states)
        return records

    def _record(self, launch: StartedRound, verdict: VerifiedRound, records: list[RowRound]) -> Round:
        """Return the round's record, without the times of drafting and verifying, which overlap."""
        round_ = super()._record(launch, verdict, records)
        round_.draft_ms = round_.verify_ms = None
        return round_

    def _counts(self) -> list[int]:
        """Return how many drafts of each row to feed; waits for more while that pays."""
        self._ahead, waited = self.draft.look(), 0.0
        while self._worth_waiting(counts := [self._ready(row) for row in self._rows], waited):
            assert self.draft.step_ms is not None
            begin, before = time.perf_counter(), self.draft.steps
            self._ahead = self.draft.look(3 * self.draft.step_ms / 1000)
            waited += 1000 * (time.perf_counter() - begin)
            if self.draft.steps == before:
                break
        self.timeline.waited_ms += waited
        return counts

    def _ready(self, row: Sequence) -> int:
        drafts = self._ahead[row.index][: min(self.lead, row.remaining - 1)]
        return sure_drafts(drafts) if self.unsure else len(drafts)

    def _worth_waiting(self, counts: list[int], waited: float) -> bool:
        """Return whether waiting for one more step of the draft pays (`StepTimes`)."""
        step_ms, session = self.draft.step_ms, self.draft.session
        if step_ms is None or session is None or not self.draft.alive:
            return False
        growing = [
            n == len(self._ahead[row.index]) < min(self.lead, row.remaining - 1, session.limit - len(row.tokens))
            for n, row in zip(counts, self._rows, strict=True)
        ]
        return self._step_times.worth_waiting(step_ms, counts, growing, waited)

    def _drafts(self, counts: list[int]) -> Tensor:
        """Return the first drafts of each row, padded with zeros: int64 [B, max(counts)]."""
        width = max(counts)
        first_drafts = [self._ahead[row.index][:n] for row, n in zip(self._rows, counts, strict=True)]
        padded = [[draft.token for draft in drafts] + [0] * (width - len(drafts)) for drafts in first_drafts]
        return torch.tensor(padded, dtype=torch.long).view(len(counts), width)

    def _tested_counts(self, counts: list[int]) -> list[int]:
        """Return how many drafts of each row to judge: those fed, and a late one if it has arrived."""
        self._ahead = self.draft.look()
        return [
            count + (len(self._ahead[row.index]) > count and row.remaining > count)
            for row, count in zip(self._rows, counts, strict=True)
        ]

    def _q(self, width: int, like: Tensor) -> Tensor:
        """Return the q of each row's first `width` drafts, float32 [B, width, V]; `like` are logits [..., V]."""
        flat = [torch.zeros((), device=like.device).expand(like.shape[-1])] * (len(self._rows) * width)
        copies = []
        for r, row in enumerate(self._rows):
            for i, draft in enumerate(self._ahead[row.index][:width]):
                if draft.q is not None:
                    flat[r * width + i] = draft.q
                else:
                    copies.append((r, i, draft.token))
        q = stack(flat).view(len(self._rows), width, -1)
        if copies:
            q[to_device(copies, like.device).unbind(1)] = 1
        return q


@dataclass
class _Arrived(Proposal):
    """The drafts that have arrived before the target's forward."""

    decoder: AmusdDecoder = field(kw_only=True)

    def in_graph(self) -> None:
        """Return None: a late draft may arrive during the forward, so no graph can judge the round."""

    def after_forward(self, output: ForwardOutput) -> Proposal:
        return self.decoder.with_late_drafts(self.num_drafted, output)


# Number of tokens that the draft runs ahead by default, and its maximum for an integer draft_length.
LEAD, LONGEST_LEAD = 8, 64


def refuse_amusd(pair: ModelPair, request: Request) -> None:
    """Raise RequestError if AMUSD can't answer the request."""
    if request.kind.windows:
        raise RequestError(
            f'method="amusd" needs a separate draft model; drafter="{request.drafter}" drafts with the target: '
            'choose drafter="model".'
        )
    if pair.draft is None or not request.kind.runs_model:
        raise RequestError(
            'method="amusd" runs a draft model in parallel with the target, and this drafter runs no model: load '
            'the pair with draft= and choose drafter="model".'
        )
    refuse_states(pair.draft_step, 'method="amusd"')
    if request.tree is not None:
        raise RequestError('method="amusd" drafts only chains: leave tree out, or choose method="bass".')
    if is_split(pair.target):
        raise RequestError(
            'method="amusd" can\'t follow a target that is split over several devices: choose "bass", or load the '
            "pair without a device_map."
        )
    if request.rule.adjust is not None:
        raise RequestError(
            f'method="amusd" can\'t verify by "{request.verification}": choose verification="auto".'
        )
    if lead_of(request) < 1:
        raise RequestError('method="amusd" needs a draft_length of at least 1: choose one, or leave it out.')


def lead_of(request: Request) -> int:
    """Return how far the draft may be ahead of the target: an integer draft_length, else LEAD."""
    length = fixed_length(request.draft_length)
    return LEAD if length is None else min(length, LONGEST_LEAD)
