"""The target's side of the link to its draft: the drafts received for each row, and the verdicts sent back.

Contract: `ahead[row]` holds the drafts of a row's current epoch that have arrived and follow its text without a
gap; blocks of another epoch are dropped. Any call may find that the draft is lost. It is then ended, `ahead` stays
empty, `alive` is False and `timeline.note` says why: nothing here raises for a lost draft.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.select import choose_backend
from ..decoding.base import DecodingParams
from ..machine.transfer import to_device
from ..models.draft_head import DraftHead
from ..models.pair import ModelPair
from ..sequence import Sequence
from .host import DraftHost, borrow, give_back
from .messages import Close, DraftLostError, Drafts, Open, Pause, Resume, RowUpdate, TextUpdate
from .pace import NEWS
from .shared_memory import Arena, Layout, LocalArena
from .timeline import Timeline

_sessions = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass
class Ahead:
    """Drafts of one row from position `start` on; the lists are those of Block in amusd/messages.py.

    `begin`: the position where the epoch began; 0 until the first verdict, before which no draft is judged.
    """

    start: int
    epoch: int = 0
    begin: int = 0
    tokens: list[int] = field(default_factory=list)
    max_probs: list[float] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)

    def move(self, start: int, same: bool) -> None:
        """The text now ends at `start`; drafts beyond it stay if it went on as drafted (`same`), else none do."""
        count = start - self.start if same else len(self.tokens)
        del self.tokens[:count], self.max_probs[:count], self.token_probs[:count], self.copied[:count]
        self.start = start
        if not same:
            self.epoch, self.begin = self.epoch + 1, start


class DraftClient:
    """One request to the pair's draft.

    lead: tokens that it may draft beyond the agreed text; drafter: a name of drafting/registry.py that runs the
    pair's draft; delay_s: for tests, see DELAYS in amusd/decoder.py.
    """

    def __init__(
        self,
        pair: ModelPair,
        rows: list[Sequence],
        params: DecodingParams,
        *,
        lead: int,
        drafter: str,
        backend: str,
        delay_s: float,
    ) -> None:
        self.timeline = Timeline()
        self.ahead = {row.index: Ahead(len(row.prompt)) for row in rows}
        self.step_ms: float | None = None
        self._session, self._lead = next(_sessions), lead
        self._head = pair.draft if isinstance(pair.draft, DraftHead) else None
        self._vocab, self._device = pair.vocab, pair.device
        self._host: DraftHost | None = None
        self._arena: Arena | None = None
        self._context = pair.draft_step.context if pair.draft_step is not None else 0
        # Steps of the draft reported so far, its forwards in them, and the tokens that its model drew.
        self.received = self.forwards = self.drawn = 0
        ends = [len(row.prompt) + row.max_new_tokens for row in rows]
        layout = self._layout(len(rows), max(ends), params)
        with self._noticing():
            host = self._host = borrow(pair)
            self._release = weakref.finalize(self, _release, pair, host, self._session)
            self._arena = Arena(layout) if host.device is not None else LocalArena(layout, pair.device)
            device = host.device or pair.device
            message = Open(
                self._session,
                [row.prompt for row in rows],
                [row.id for row in rows],
                ends,
                lead,
                params.sampling,
                params.seed,
                params.verification,
                backend if device.type == pair.device.type else choose_backend("auto", device),
                layout,
                drafter,
                delay_s,
            )
            host.send(message, self._arena)
            host.paused = True
            self._arena.close_fd()

    def _layout(self, rows: int, length: int, params: DecodingParams) -> Layout:
        layout: Layout = {}
        if not params.sampling.greedy and not params.verification.coupled and params.synthetic is None:
            outputs = self._vocab if self._head is None else len(self._head.vocabulary)
            layout["q"] = ((rows, self._lead + 1, outputs), torch.float32)
        if self._head is not None:
            layout["states"] = ((rows, length + 1, self._head.config.hidden), torch.float32)
        return layout

    @property
    def alive(self) -> bool:
        """Whether the draft is still there."""
        return self._host is not None

    @property
    def process(self) -> int | None:
        """The id of the draft's process, if it has one."""
        process = self._host.process if self._host is not None else None
        return None if process is None else process.pid

    def room(self, row: Sequence) -> int:
        """Tokens that still fit the draft's own context after the row's text."""
        return self._context - len(row.tokens)

    def collect(self, timeout_s: float = 0.0) -> None:
        """Take in the messages that have arrived; waits up to `timeout_s` seconds for a first one."""
        with self._noticing():
            if self._host is not None:
                messages = self._host.receive(timeout_s)
                self._take(messages)
                if not messages:  # a draft that has just sent a message is alive
                    self._host.check()

    def _take(self, messages: list[object]) -> None:
        line = self.timeline
        for message in messages:
            if not isinstance(message, Drafts) or message.session != self._session:
                continue
            self.received += 1
            line.add_draft(message.begin, message.end)
            for _ in range(message.rolled_back - line.rolled_back):
                line.add_rollback(message.begin)
            if message.made > line.made and not any(any(block.copied) for block in message.blocks):
                spent = 1000 * (message.end - message.begin)
                if self.step_ms is None or 2 * spent < self.step_ms:  # an earlier step may have compiled kernels
                    self.step_ms = spent
                self.step_ms += NEWS * (spent - self.step_ms)
            line.made, self.drawn, self.forwards = message.made, message.drawn, message.forwards
            for block in message.blocks:
                ahead = self.ahead.get(block.row)
                if ahead is not None and ahead.epoch == block.epoch:
                    assert block.start == ahead.start + len(ahead.tokens), "blocks of one epoch leave no gap"
                    ahead.tokens += block.tokens
                    ahead.max_probs += block.max_probs
                    ahead.token_probs += block.token_probs
                    ahead.copied += block.copied
        line.waiting = sum(len(ahead.tokens) for ahead in self.ahead.values())

    def agree(self, row: Sequence, tokens: list[int], same: bool) -> RowUpdate:
        """The row has just written `tokens` (`same`: as drafted); updates `ahead`, returns the verdict to send."""
        ahead = self.ahead[row.index]
        start = ahead.start
        ahead.move(len(row.tokens), same)
        if row.finish_reason:
            del self.ahead[row.index]
        return RowUpdate(row.index, ahead.epoch, start, tokens, row.finish_reason is not None)

    def send(self, verdicts: list[RowUpdate]) -> None:
        """Send the verdicts to the draft."""
        self.timeline.waiting = sum(len(ahead.tokens) for ahead in self.ahead.values())
        with self._noticing():
            if self._host is not None:
                self._host.send(TextUpdate(self._session, verdicts))

    def q(self, rows: list[Sequence], starts: list[int], width: int) -> Tensor | None:
        """float32 [B, width, V]: the distributions of the drafts from position starts[r] on; None if unused."""
        if self._arena is None or "q" not in self._arena or width == 0:
            return None
        ring = self._arena["q"].shape[1]
        slots = [(start + i) % ring for start in starts for i in range(width)]
        indices = [row.index for row in rows for _ in range(width)]
        q = self._arena.read("q", indices, slots, self._device).view(len(rows), width, -1)
        if self._head is not None:
            full = torch.zeros(*q.shape[:2], self._vocab, device=self._device)
            q = full.index_copy_(2, self._head.vocabulary.to(self._device), q)
        copies = [
            (r, i, token)
            for r, row in enumerate(rows)
            for i, (token, copied) in enumerate(
                zip(self.ahead[row.index].tokens[:width], self.ahead[row.index].copied, strict=False)
            )
            if copied
        ]
        if copies:
            r, i, token = to_device(copies, self._device).unbind(1)
            q[r, i] = 0
            q[r, i, token] = 1
        return q

    def write_states(self, rows: list[Sequence], starts: list[int], states: list[Tensor]) -> None:
        """Give the draft the target's states [k, hidden] of each row's k tokens from position starts[r] on."""
        if self._arena is not None:
            indices = [row.index for row, own in zip(rows, states, strict=True) for _ in own]
            places = [start + i for start, own in zip(starts, states, strict=True) for i in range(len(own))]
            self._arena.write("states", indices, places, torch.cat(states))

    def pause(self) -> None:
        """Stop the draft after its current step until `resume`, because another lane has the machine."""
        with self._noticing():
            host = self._host
            if host is None or host.paused:
                return
            host.send(Pause(self._session))
            host.paused = True
            while True:
                messages = host.receive(host.patience_s / 4)
                self._take(messages)
                if any(isinstance(message, Pause) for message in messages):
                    return
                host.check()

    def resume(self) -> None:
        """Let a paused draft go on."""
        with self._noticing():
            if self._host is not None and self._host.paused:
                self._host.paused = False
                self._host.send(Resume())

    def close(self) -> None:
        """Pause the draft and give it back; what it still holds for this request is freed."""
        self.pause()
        self.timeline.waiting = 0
        if self._host is not None:
            self._host = self._arena = None
            self._release()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """If the draft turns out to be lost in the block, end it and set `timeline.note`."""
        try:
            yield
        except DraftLostError as error:
            note = f"{error} This lane goes on as regular decoding."
            _log.warning(note)
            self.timeline.note = note
            if self._host is not None:
                self._release.detach()
                self._host.end()
            self._host = self._arena = None
            for ahead in self.ahead.values():
                ahead.move(ahead.start, same=False)


def _release(pair: ModelPair, host: DraftHost, session: int) -> None:
    try:
        host.paused = False
        host.send(Close(session))
        give_back(pair, host)
    except DraftLostError:
        host.end()
