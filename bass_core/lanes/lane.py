"""A lane: a decoder with its own clock, one column of the race.

`step()` runs one step of the decoder and counts only the time that the device spent on it. If a step raises, the
scheduler ends the lane (schedule.py). methods.py builds the decoder, view.py shows the lane.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

from ..decode.base import CacheBytes, Decoder, TimelineView
from ..decode.cost_store import DOUBTS, CostCheck
from ..decode.peaks import doubt_peaks, known_peaks
from ..decode.request import Request
from ..decode.text import TextStream
from ..errors import TokenizerError
from ..length.costs import CostTable
from ..machine.hardware import Peaks
from ..machine.memory import shortage_explained
from ..machine.torch_state import torch_defaults
from ..model.pair import ModelPair
from ..model.weights.placement import is_split
from ..sequence import Reading, Round
from .clock import LaneClock, PredictedClock
from .methods import find_method
from .metrics import Counts, Metrics, summarise
from .pace import ENDS, Pace, Tally
from .trace import Trace
from .utilization import Work

# Milliseconds of lane time that an AMUSD lane runs before another lane's turn. Pausing its draft then costs up to
# one draft step, which is little compared with this time.
SLICE_MS = 100.0


class Lane:
    """One method that answers one request.

    Attributes:
        sequences: the lane's own rows.
        error: a message if a step failed, else None.
        cache: bytes of its caches. None if the decoder doesn't report them, or if a simulated clock predicts the
            times of other models than the pair that runs.
        reading: progress of the prefill while prompts are read, else None.
        held: keeps a snapshot from seeing a half-done step.
        turn: a snapshot takes it before `held`, and a step waits for it first. With one lock, a busy lane would
            starve the snapshots. (Entering these compiled locks can't be interrupted, as a class of ours could.)
    """

    def __init__(self, pair: ModelPair, request: Request, method: str) -> None:
        entry = find_method(method)
        self.method, self.request, self.reference = entry.name, request, entry.reference
        self.sequences = request.sequences()
        simulated = request.clock
        self.clock = (
            LaneClock(pair.device) if simulated is None else PredictedClock(simulated, request.kind.runs_model)
        )
        self.counts = Counts()
        self.tally = Tally(len(self.sequences))
        self.trace = Trace(pair.tokenizer)
        self.work = _work(pair, request)
        # The peaks of a split target are unknown, so no lane exceeds them.
        self._place = pair.device, pair.dtype
        costs = request.costs if entry.drafts and request.costs_path is not None else None
        self._cost_check = CostCheck(costs) if isinstance(costs, CostTable) else None
        self.error: str | None = None
        self.turn, self.held = threading.Lock(), threading.Lock()
        self._unreadable = False
        self._texts = [
            TextStream(pair.tokenizer, request.stop) if pair.tokenizer is not None else None
            for _ in self.sequences
        ]
        with shortage_explained():
            self._decoder: Decoder | None = entry.build(pair, request, self.sequences)
        # A simulated clock without a measured table predicts the times of other models than the pair that runs, so
        # the size of the pair's caches would mislead.
        simulates_pair = simulated is None or simulated.table is not None
        self.cache: CacheBytes | None = getattr(self._decoder, "cache", None) if simulates_pair else None
        self.reading: Reading | None = None
        # `timeline`: when draft and target were busy. `slice_ms`: the lane's shortest turn in a fair race. If
        # draft and target don't overlap, these are None and 0.
        self.timeline: TimelineView | None = self._decoder.timeline
        self.slice_ms = 0.0 if self.timeline is None else SLICE_MS
        self._forwards = 0
        # Lane time of the last step's end.
        self._ended_ms = 0.0

    @property
    def finished(self) -> bool:
        return self._decoder is None

    @property
    def texts(self) -> list[TextStream | None]:
        """The rows' texts so far. Tokens are decoded when the texts are read, so that no round waits for it."""
        for sequence, text in zip(self.sequences, self._texts, strict=True):
            if text is not None:
                for token in sequence.token_ids[len(text.ids) : len(sequence.times_ms)]:
                    text.push(token)
                if sequence.finish_reason:
                    text.end()
        return self._texts

    def readable_texts(self) -> list[TextStream | None]:
        """Return `texts`. If the tokenizer fails, end the lane with a message and return the texts so far."""
        if not self._unreadable:
            try:
                return self.texts
            except TokenizerError as error:
                self._unreadable = True
                self.fail(str(error))
        return self._texts

    @property
    def decode_ms(self) -> float:
        """Lane time in milliseconds, without the prefills."""
        return self.clock.ms - self.counts.prefill_ms

    @torch_defaults()
    def step(self) -> Round:
        """Run and time one step, and record its tokens' times. End the lane once its time budget is spent."""
        assert self._decoder is not None, "a finished lane is not stepped"
        before = self.clock.ms
        with self.clock.running(), shortage_explained():
            round_ = self._decoder.step()
            self.clock.next_begins(getattr(self._decoder, "next_begins", None))
        self.clock.count(round_, self.sequences)
        if round_.explain is not None:
            # Fill in the details now: the clock is stopped, and the round's logits still exist.
            round_.explain()
            round_.explain = None
        round_.time_ms = self.clock.ms
        self.reading = round_.reading
        self._forwards = self._decoder.target_forwards
        self.counts.add(round_, self.clock.ms - before)
        if self._cost_check is not None:
            self._cost_check.add(round_, self.clock.ms - before)
        self.trace.add(round_)
        self._count(round_)
        self.work.add(round_, self.sequences)
        budget = self.request.time_budget_ms
        if self._decoder.finished:
            self._release()
        elif budget is not None and self.clock.ms >= budget:
            self.end("budget")
        return round_

    def end(self, reason: str) -> None:
        """Finish all unfinished sequences with this reason, and free the caches."""
        self._release()
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or reason

    @torch_defaults()
    def prepare(self) -> None:
        """Capture the graphs that the first round will replay, outside the measured time."""
        if self._decoder is not None:
            with shortage_explained():
                self._decoder.prepare()

    def pause(self) -> None:
        """Stop this lane's background work (AMUSD's draft) before another lane is stepped."""
        if self._decoder is not None and self.timeline is not None:
            with self.clock.running():
                self._decoder.pause()

    def _release(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._doubt_figures()
        self._decoder = self.reading = None

    def fail(self, message: str) -> None:
        """End the lane with a message for the user. The first message counts."""
        self.error = self.error or message
        self.end("error")

    def metrics(self) -> Metrics:
        """Return the lane's metrics at its current lane time."""
        metrics = summarise(self.counts, self.sequences, self.clock.ms, self._forwards)
        pace = self.pace
        return replace(
            metrics,
            plain_steps=pace.plain_steps or None,
            ms_per_token=pace.ms_per_token,
            **cast(dict[str, Any], self.work.utilization(self.decode_ms)),
        )

    def _doubt_figures(self) -> None:
        """Doubt stored figures of this machine that the lane was faster than."""
        shares = self.work.utilization(self.decode_ms).values()
        if any(share is not None and share > 1 for share in shares) and self.request.clock is None:
            doubt_peaks(*self._place)
        for rows in self._cost_check.too_high() if self._cost_check is not None else ():
            DOUBTS.add((self.request.costs_path, rows))

    @property
    def pace(self) -> Pace:
        """The lane's rounds so far, from which its speed is computed."""
        return self.tally.pace(self.finished)

    def _count(self, round_: Round) -> None:
        """Note when the round's tokens were written, and how many."""
        rows = []
        for row in round_.rows:
            sequence = self.sequences[row.sequence]
            if round_.kind == "prefill":
                sequence.prefilled_ms = self.clock.ms
            sequence.times_ms += [self.clock.ms] * len(row.tokens)
            rows.append((row.sequence, len(row.tokens), sequence.finish_reason in ENDS))
        self.tally.add(round_.kind, self.clock.ms - self._ended_ms, rows)
        self._ended_ms = self.clock.ms


def _work(pair: ModelPair, request: Request) -> Work:
    """Return a Work without rounds, for this device and pair or for those of the simulated clock."""
    drafts = request.kind.runs_model
    simulated = request.clock
    if simulated is not None and simulated.table is None:
        target, draft = simulated.models
        return Work(target.cost, draft.cost if drafts else None, simulated.peaks)
    draft_model = pair.draft_step if drafts else None
    # A split target computes on several devices, so the peaks of one device don't apply.
    peaks = Peaks() if is_split(pair.target) else known_peaks(pair.device, pair.dtype)
    return Work(pair.target_step.cost, None if draft_model is None else draft_model.cost, peaks)
