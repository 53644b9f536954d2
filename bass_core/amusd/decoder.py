"""AMUSD (arXiv 2410.17375): draft and target work at the same time, on two devices; batched, and with sampling.

Contract: the draft (amusd/session.py, in a process of its own) never waits for a verdict: it keeps drafting, up to
`lead` tokens beyond those that are being verified. The target verifies the drafts that have arrived. Its logits
after the last token it was fed judge one more draft, which arrived during the step (the *late* draft): if that is
accepted, draft and target stay in step and nothing is rolled back. The text keeps the target's distribution by the
usual rules (verification/rejection.py), with the q that each draft was really drawn from. The block of block
verification is what a round verifies, the late draft included; an epoch goes on only where all of it is accepted,
so no u is used twice, and drafts behind it have decided nothing. If no draft has arrived, the target takes a plain
step, unless the next draft is due so soon that waiting pays (`_worth_waiting`). A draft that crashes or hangs is
given up: the lane goes on as regular decoding, and `timeline.note` says so.

The drafters that run the pair's draft are those of drafting/registry.py. A draft head reads the target's states,
which come with the verdicts; until then it uses its own states.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime

from ..decoding.base import DecodingParams, cache_bytes
from ..decoding.batch import BatchDecoder
from ..decoding.record import write_round
from ..decoding.request import Request
from ..drafting.registry import DRAFTERS, confident_prefix
from ..engine.cuda_graphs import runner_for
from ..engine.prefill import PrefillSteps
from ..engine.runner import ModelRunner
from ..machine.transfer import to_device
from ..models.draft_head import DraftHead
from ..models.forward import ForwardOutput
from ..models.pair import ModelPair
from ..sampling.noise import NoiseKeys
from ..sequence import Round, RowRound, Sequence
from ..verification.acceptance import RowOutcome, refuse_unsound
from ..verification.rejection import verify
from .checks import lead_of, refuse_amusd
from .client import DraftClient
from .host import split_threads
from .pace import Pace
from .timeline import Timeline

# For tests: each step of target and draft is delayed by a random time of up to so many seconds.
DELAYS = (0.0, 0.0)


def build_amusd(
    pair: ModelPair, request: Request, params: DecodingParams, sequences: list[Sequence]
) -> AmusdDecoder:
    """The decoder of a request; starts the pair's draft process unless it is running already."""
    refuse_amusd(pair, request)
    name = str(request.drafter)  # of one that runs a model, as refuse_amusd has seen
    lead, kind = lead_of(request), DRAFTERS[name]
    texts = request.texts(lead + 2)
    runner = runner_for(pair.target_step, len(sequences), texts, pair.vocab, request.backend)
    client = DraftClient(
        pair,
        sequences,
        params,
        # While `lead` drafts are verified, the draft makes the late one and the next `lead`.
        lead=2 * lead + 1,
        drafter=name,
        backend=request.backend,
        delay_s=DELAYS[1],
    )
    states = isinstance(pair.draft, DraftHead)
    return AmusdDecoder(sequences, runner, params, client, lead, kind.stops_when_unsure, states)


class AmusdDecoder(BatchDecoder):
    """The target's side. A round feeds each row the drafts ahead of it, at most `lead` tokens."""

    def __init__(
        self,
        sequences: list[Sequence],
        target: ModelRunner,
        params: DecodingParams,
        client: DraftClient,
        lead: int,
        confidence: bool,
        return_states: bool,
    ) -> None:
        super().__init__(sequences, target, params, return_states=return_states)
        self.cache = cache_bytes(target, elsewhere=True)
        self.client, self.lead, self.confidence = client, lead, confidence
        # The draft's forwards, and the tokens that it drew, up to the end of the last round.
        self._billed = (0, 0)
        self._split, self._pace = not is_accelerator(target.device), Pace()

    @property
    def timeline(self) -> Timeline:
        """When draft and target were busy."""
        return self.client.timeline

    def step(self) -> Round:
        """As every decoder's; the draft goes on drafting after the return, until `pause`."""
        with self._slice():
            self.client.resume()
            return super().step()

    def pause(self) -> None:
        """Stop the draft while another lane has the machine; waiting for its step counts as this lane's time."""
        with self._slice():
            self.client.pause()

    def close(self) -> None:
        """Give the draft back."""
        self.client.close()

    @contextmanager
    def _slice(self) -> Iterator[None]:
        """Let this lane's time pass; on a CPU, give the target its share of the cores and the draft the rest."""
        before, own = torch.get_num_threads(), split_threads()[0]
        split = self._split and self.client.alive and own != before
        if split:
            torch.set_num_threads(own)
        try:
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
            if self.return_states:
                self.client.write_states(rows, [0] * len(rows), prefill.states())
            verdicts = [
                self.client.agree(row, record.tokens, same=False)
                for row, record in zip(rows, round_.rows, strict=True)
            ]
            self.client.send(verdicts)
        return round_

    def _round(self) -> Round:
        rows, keys = list(self._rows), self._keys()
        keys.epochs = to_device([self.client.ahead[row.index].begin for row in rows], self.target.device)
        counts = self._counts()
        begin = time.perf_counter()
        output = self._feed(counts)
        tested = self._tested_counts(counts)
        starts = [len(row.tokens) for row in rows]
        drafts = self._drafts(tested)
        outcomes = self._judge(output.logits, drafts, tested, starts, keys)
        # Behind a late draft that stands there are no logits, and the row writes no token of the target's.
        told = zip(outcomes, counts, strict=True)
        refuse_unsound([outcome.next_token for outcome, fed in told if outcome.accepted <= fed])
        self.target_forwards += 1
        self._measure(counts, begin)
        records, verdicts, states = [], [], []
        tests = self.params.synthetic is None and not self.params.sampling.greedy
        together = tests and self.params.verification.together
        for r, row in enumerate(rows):
            outcome, stand = outcomes[r], outcomes[r].accepted
            settled = min(stand, counts[r]) + 1
            self.target.commit(r, self.target.lengths[r] + settled)
            if output.states is not None:
                states.append(output.states[r, :settled])
            # Draft by draft, a late one is looked at only if all drafts before it are accepted.
            seen = tested[r] if together or stand >= counts[r] else min(counts[r], tested[r])
            same = stand == tested[r] > counts[r]
            record = write_round(row, outcome, seen, ends=not same)
            records.append(record)
            self._count(record)
            verdicts.append(self.client.agree(row, record.tokens, same))
        if states:
            self.client.write_states(rows, [start - 1 for start in starts], states)
        self.client.send(verdicts)
        self._drop_finished()
        forwards, drawn = self._new_draft_work()
        kind = "verify" if max(tested) else "plain"
        return Round(kind, max(tested), records, draft_forwards=forwards, draft_tokens=drawn, lengths=tested)

    def _new_draft_work(self) -> tuple[int, int]:
        """The draft's forwards since the last round, as far as reported, and the tokens that it drew in them."""
        (forwards, drawn), client = self._billed, self.client
        self._billed = client.forwards, client.drawn
        return client.forwards - forwards, client.drawn - drawn

    def _counts(self) -> list[int]:
        """How many drafts of each row to feed; waits for more while waiting pays."""
        self.client.collect()
        waited = 0.0
        while self._worth_waiting(counts := [self._ready(row) for row in self._rows], waited):
            assert self.client.step_ms is not None
            begin, before = time.perf_counter(), self.client.received
            self.client.collect(3 * self.client.step_ms / 1000)
            waited += 1000 * (time.perf_counter() - begin)
            if self.client.received == before:
                break
        self.timeline.waited_ms += waited
        return counts

    def _ready(self, row: Sequence) -> int:
        ahead = self.client.ahead[row.index]
        count = min(len(ahead.tokens), self.lead, row.remaining - 1)
        return confident_prefix(ahead.max_probs[:count], ahead.token_probs[:count]) if self.confidence else count

    def _worth_waiting(self, counts: list[int], waited: float) -> bool:
        """Whether waiting for one more step of the draft pays (amusd/pace.py)."""
        step_ms = self.client.step_ms
        if step_ms is None or not self.client.alive:
            return False
        growing = [
            n
            == len(self.client.ahead[row.index].tokens)
            < min(self.lead, row.remaining - 1, self.client.room(row))
            for n, row in zip(counts, self._rows, strict=True)
        ]
        return self._pace.worth_waiting(step_ms, counts, growing, waited)

    def _feed(self, counts: list[int]) -> ForwardOutput:
        """The target's output for each row's newest token and its drafts, [B, width + 1]; complete on return."""
        if DELAYS[0]:
            time.sleep(random.random() * DELAYS[0])
        device = self.target.device
        drafts = torch.tensor(self._drafts(counts), dtype=torch.long).view(len(counts), max(counts))
        output = self._forward(to_device(drafts, device), counts)
        if is_accelerator(device):
            runtime(device).current_stream(device).synchronize()
        return output

    def _drafts(self, counts: list[int]) -> list[list[int]]:
        """The first drafts of each row, padded with zeros to the longest."""
        width = max(counts)
        found = [self.client.ahead[row.index].tokens[:n] for row, n in zip(self._rows, counts, strict=True)]
        return [tokens + [0] * (width - len(tokens)) for tokens in found]

    def _tested_counts(self, counts: list[int]) -> list[int]:
        """How many drafts of each row can be judged now: those that were fed, and a late one if it has arrived."""
        self.client.collect()
        if not self.client.alive:  # its q is lost with the draft, so the drafts that were fed can't be judged
            return [0] * len(counts)
        return [
            count + (len(self.client.ahead[row.index].tokens) > count and row.remaining > count)
            for row, count in zip(self._rows, counts, strict=True)
        ]

    def _judge(
        self, logits: Tensor, drafts: list[list[int]], tested: list[int], starts: list[int], keys: NoiseKeys
    ) -> list[RowOutcome]:
        """Verify the drafts: one outcome per row."""
        width, device = max(tested), logits.device
        if width == logits.shape[1]:
            # There are no logits after a late draft and none are read, but `verify` needs a column there.
            logits = torch.cat((logits, logits[:, -1:]), dim=1)
        q = self.client.q(self._rows, starts, width)
        verdict = verify(
            logits[:, : width + 1],
            to_device(torch.tensor(drafts, dtype=torch.long).view(len(tested), width), device),
            q,
            to_device(tested, device),
            keys,
            self.params.sampling,
            verification=self.params.verification,
            synthetic=self.params.synthetic,
        )
        return verdict.host()

    def _measure(self, counts: list[int], begin: float) -> None:
        end = time.perf_counter()
        self.timeline.add_target(begin, end)
        self._pace.measure(1000 * (end - begin), plain=not max(counts))

    def _count(self, record: RowRound) -> None:
        self.timeline.looked_at += len(record.drafted)
        self._pace.count(record.accepted, len(record.drafted))
