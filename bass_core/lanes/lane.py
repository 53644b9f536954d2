"""A decoder with its own clock: one column of the race.

Contract: `step()` runs one step of the decoder and counts only the time the device spent on it. An exception in
a step leaves the lane finished. How the decoder is made is its method's matter (methods.py), what of the lane is
shown view.py's.
"""

from __future__ import annotations

from dataclasses import replace

from ..decoding.base import Decoder, Timeline
from ..decoding.request import Request
from ..drafting.registry import runs_model
from ..machine.hardware import known_bandwidth
from ..machine.memory import shortage_explained
from ..models.pair import ModelPair
from ..sequence import Round
from .clock import FairLock, LaneClock
from .methods import find_method
from .metrics import Counts, Metrics, summarise
from .output.detokenizer import TextStream
from .output.trace import Trace
from .utilization import Work

# Pausing AMUSD's draft costs up to one of its steps: a turn this long makes that a small part.
SLICE_MS = 100.0


class Lane:
    """One method answering one request. `sequences` are its own; `error` is set when a step failed."""

    def __init__(self, pair: ModelPair, request: Request, method: str) -> None:
        found = find_method(method)
        self.method, self.request, self.reference = found.name, request, found.reference
        self.sequences = request.sequences()
        self.clock = LaneClock(pair.device)
        self.counts = Counts()
        self.log = Trace(pair.tokenizer)
        self.device, self.dtype = pair.device, pair.dtype
        draft = pair.draft_step if runs_model(request.drafter) else None
        self.work = Work(
            pair.target_step.cost, None if draft is None else draft.cost, bandwidth=known_bandwidth(pair.device)
        )
        self.error: str | None = None
        # A step and a view never see each other half-done.
        self.lock = FairLock()
        self.texts = [TextStream(pair.tokenizer) if pair.tokenizer is not None else None for _ in self.sequences]
        with shortage_explained():
            self._decoder: Decoder | None = found.build(pair, request, self.sequences)
        # Of a lane whose draft works beside its target: when who was busy, and its shortest turn in a fair race.
        self.timeline: Timeline | None = self._decoder.timeline
        self.slice_ms = 0.0 if self.timeline is None else SLICE_MS
        self._forwards = 0

    @property
    def finished(self) -> bool:
        return self._decoder is None

    @property
    def decode_ms(self) -> float:
        """Lane time without any of its prefills."""
        return self.clock.ms - self.counts.prefill_ms

    def step(self) -> Round:
        """One step, timed. Sequences get their tokens' times; a spent time budget ends the lane."""
        assert self._decoder is not None, "a finished lane is not stepped"
        before = self.clock.ms
        with self.clock.running(), shortage_explained():
            round_ = self._decoder.step()
        round_.time_ms = self.clock.ms
        self._forwards = self._decoder.target_forwards
        self.counts.add(round_, self.clock.ms - before)
        self.log.add(round_)
        for row in round_.rows:
            self._record(row.sequence, row.tokens, round_.kind == "prefill")
        self.work.add(round_, self.sequences)
        budget = self.request.time_budget_ms
        if self._decoder.finished:
            self._release()
        elif budget is not None and self.clock.ms >= budget:
            self.end("budget")
        return round_

    def end(self, reason: str) -> None:
        """Finish what is unfinished and free the caches."""
        self._release()
        for sequence, text in zip(self.sequences, self.texts, strict=True):
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                if text is not None:
                    text.end()

    def prepare(self) -> None:
        """Have captured, off the clock, what the first round will replay."""
        if self._decoder is not None:
            with shortage_explained():
                self._decoder.prepare()

    def pause(self) -> None:
        """Before another lane is stepped: what works on for this one between its steps comes to a halt."""
        if self._decoder is not None and self.timeline is not None:
            with self.clock.running():
                self._decoder.pause()

    def _release(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
        self._decoder = None

    def fail(self, message: str) -> None:
        """End the lane with a message for the user."""
        self.error = message
        self.end("error")

    def metrics(self) -> Metrics:
        """The lane's figures at this moment of its clock."""
        metrics = summarise(self.counts, self.sequences, self.clock.ms, self._forwards)
        return replace(metrics, **self.work.utilization(self.decode_ms, self.device, self.dtype))

    def _record(self, index: int, tokens: list[int], prefill: bool) -> None:
        sequence, text = self.sequences[index], self.texts[index]
        if prefill:
            sequence.prefilled_ms = self.clock.ms
        sequence.times_ms += [self.clock.ms] * len(tokens)
        if text is not None:
            for token in tokens:
                text.push(token)
            if sequence.finish_reason:
                text.end()
