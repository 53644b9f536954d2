"""The draft's side of AMUSD: rows that are drafted ahead of the agreed text, one token each a step.

Contract: `step` runs one forward for all rows that may go on (or one chunk of prefill) and returns what it
drafted; `judge` takes the target's verdict. A row rolls back only where its text differs from the verdict's; what
it drafted beyond that stays, and is announced anew under the new epoch. Each token is drawn with the noise of
(seed, sequence id, position, where the epoch began), from the q that is written beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime

from ..drafting.registry import CASCADE_MATCH, confident_prefix
from ..engine.cuda_graphs import make_runner
from ..engine.runner import PrefillSteps
from ..machine.transfer import to_device
from ..models.base import CausalModel
from ..models.draft_head import DraftHead
from ..models.forward import ForwardBatch
from ..sampling.distribution import argmax, probabilities
from ..sampling.draw import draw
from ..sampling.noise import stream
from ..verification.table import find_verification
from .link import Block, Open, RowUpdate
from .shared_memory import Arena
from .states import HeadStates

# A run of this many tokens that stood before is copied on.
COPY_RUN = CASCADE_MATCH
# Slots of one row that are fed in one forward.
CHUNK = 128


@dataclass
class Row:
    """`tokens`: the agreed text, then the drafts; `agreed`: how many of them are agreed."""

    index: int
    id: int
    end: int
    tokens: list[int]
    agreed: int
    epoch: int = 0
    # Where the epoch began, as far as the draft knows.
    begin: int = 0
    max_probs: list[float] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    # Tokens from the first on whose state a head can read; the last token's is not needed.
    known: int = 0
    # Where each run of COPY_RUN tokens of the agreed text ended last, and how far that was looked up.
    runs: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = COPY_RUN

    def copies(self, count: int) -> list[int]:
        """`count` tokens from behind the latest place in the agreed text that reads like the end; or none."""
        for stop in range(self.indexed, self.agreed):
            self.runs[tuple(self.tokens[stop - COPY_RUN : stop])] = stop
        self.indexed = max(self.indexed, self.agreed)
        at = self.runs.get(tuple(self.tokens[-COPY_RUN:]))
        return [] if at is None else [self.tokens[at + i % (len(self.tokens) - at)] for i in range(count)]


class DraftSession:
    """One request. `model` is the draft's, `head` the draft head that it is the body of, if it is one."""

    def __init__(self, spec: Open, arena: Arena, model: CausalModel, head: DraftHead | None, vocab: int) -> None:
        self.spec, self.arena, self.head = spec, arena, head
        length = max(spec.ends) + 2 * spec.lead + CHUNK
        outputs = vocab if head is None else len(head.vocabulary)
        self.runner = make_runner(model, len(spec.prompts), length, outputs, spec.backend)
        limit = model.context
        self.rows = [
            Row(index, spec.sequence_ids[index], min(spec.ends[index], limit), list(prompt), len(prompt))
            for index, prompt in enumerate(spec.prompts)
        ]
        self.made = self.rolled_back = 0
        self.role = find_verification(spec.verification).draft_role
        self._prefill: PrefillSteps | None = None
        self._early: list[RowUpdate] = []
        if head is None:
            self._prefill = self.runner.prefill([prompt[:limit] for prompt in spec.prompts])
        else:
            self.states = HeadStates(head, arena, len(spec.prompts), max(spec.ends) + 1, model.device)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prefill is not None or any(self._copies(row) or self._may_ask(row) for row in self.rows)

    def _room(self, row: Row) -> int:
        ahead = len(row.tokens) - row.agreed
        # Behind a draft that is unsure the target would not look at another.
        if self.spec.confidence and confident_prefix(row.max_probs, row.token_probs) < ahead:
            return 0
        return min(row.end - len(row.tokens), self.spec.lead - ahead)

    def _copies(self, row: Row) -> list[int]:
        return row.copies(self._room(row)) if self.spec.copies and self._room(row) > 0 else []

    def _may_ask(self, row: Row) -> bool:
        """Whether the model can be asked: a head needs the state of each token but the last."""
        return self._room(row) > 0 and (self.head is None or len(row.tokens) - 1 <= row.known)

    def judge(self, verdicts: list[RowUpdate]) -> list[Block]:
        """Take over what the target decided; the drafts that survive a new epoch, to be announced again."""
        if self._prefill is not None:  # rows keep their places until their prompts are in the cache
            self._early += verdicts
            return []
        blocks = [self._judge_row(verdict) for verdict in verdicts]
        if self.head is not None:
            self.states.fetch()
        return [block for block in blocks if block is not None]

    def _judge_row(self, verdict: RowUpdate) -> Block | None:
        place = next(r for r, row in enumerate(self.rows) if row.index == verdict.row)
        if verdict.finished:
            self._forget(place)
            return None
        row = self.rows[place]
        assert verdict.start == row.agreed, "a verdict continues the agreed text"
        end = verdict.start + len(verdict.tokens)
        same = 0
        for ours, theirs in zip(row.tokens[verdict.start : end], verdict.tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(verdict.tokens):
            at = verdict.start + same
            self.rolled_back += at < len(row.tokens)
            row.tokens[at:] = verdict.tokens[same:]
            self.runner.commit(place, min(self.runner.lengths[place], at))
            row.max_probs, row.token_probs, row.copied = [], [], []
        else:
            del row.max_probs[:same], row.token_probs[:same], row.copied[:same]
        row.agreed = end
        if self.head is not None:
            self._bring_states(place, verdict.start, end)
        if verdict.epoch == row.epoch:
            return None
        row.epoch, row.begin = verdict.epoch, end
        return self._block(row, end) if len(row.tokens) > end else None

    def _block(self, row: Row, start: int) -> Block:
        at = start - row.agreed
        return Block(
            row.index,
            row.epoch,
            start,
            row.tokens[start:],
            row.max_probs[at:],
            row.token_probs[at:],
            row.copied[at:],
        )

    def _bring_states(self, place: int, start: int, end: int) -> None:
        """The target's states of all agreed tokens but the newest are known: slots behind them are fed anew."""
        row = self.rows[place]
        first = 0 if row.epoch == 0 else start - 1
        self.states.bring(row.index, first, end - 1)
        self.runner.commit(place, min(self.runner.lengths[place], first + 1 if first else 0))
        # Own states of drafts that are gone must not be read; those of drafts that stay may.
        row.known = max(end - 1, min(row.known, len(row.tokens))) if len(row.tokens) > end else end - 1

    def close(self) -> None:
        """Nothing that was queued touches the request's memory after this; who takes that next may write to it."""
        if is_accelerator(self.runner.device):
            runtime(self.runner.device).current_stream(self.runner.device).synchronize()

    def _forget(self, place: int) -> None:
        last = len(self.rows) - 1
        self.runner.move_row(last, place)
        self.rows[place] = self.rows[last]
        self.rows.pop()

    @torch.inference_mode()
    def step(self) -> list[Block]:
        """One chunk of prefill, or one drafted token for every row that may go on."""
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        copied = [self._copies(row) for row in self.rows]
        blocks = [self._append(row, run, None) for row, run in zip(self.rows, copied, strict=True) if run]
        going = [not run and self._may_ask(row) for row, run in zip(self.rows, copied, strict=True)]
        return blocks + self._ask(going) if any(going) else blocks

    def _ask(self, going: list[bool]) -> list[Block]:
        """One token of the model's for the rows that go on."""
        logits = self._feed(going)
        columns, q = self._draw(logits)
        tokens = columns if self.head is None else self.head.vocabulary[columns]
        if q is not None and "q" in self.arena:
            self._write_q(going, q)
        drawn = tokens.tolist()
        if q is None:
            sure_of = [(1.0, 1.0)] * len(drawn)
        else:
            sure_of = torch.stack((q.amax(-1), q.gather(-1, columns[:, None])[:, 0]), dim=-1).tolist()
        return [self._append(row, [drawn[r]], sure_of[r]) for r, row in enumerate(self.rows) if going[r]]

    def _prefill_step(self, prefill: PrefillSteps) -> list[Block]:
        prefill.step()
        if not prefill.done:
            return []
        self._prefill = None
        # The last prompt token is fed once more, for the logits behind it.
        for place, length in enumerate(self.runner.lengths):
            self.runner.commit(place, length - 1)
        early, self._early = self._early, []
        return self.judge(early)

    def _feed(self, going: list[bool]) -> Tensor:
        """Logits [B, V'] behind each row's last token; a row that does not go on is fed as padding."""
        runner, batch = self.runner, len(self.rows)
        starts = runner.lengths[:batch]
        counts = [
            len(row.tokens) - start if go else 0 for row, start, go in zip(self.rows, starts, going, strict=True)
        ]
        logits = torch.empty(0)
        for at in range(0, max(counts), CHUNK):
            width = min(max(counts) - at, CHUNK)
            left = [max(0, min(count - at, width)) for count in counts]
            begins = [start + min(at, count) for start, count in zip(starts, counts, strict=True)]
            take = [max(count - 1, 0) for count in left]
            fed = [max(count, 1) for count in left]
            inputs = self._inputs(begins, left, width)
            output = runner.forward(ForwardBatch(inputs, begins, fed, take, return_states=self.head is not None))
            chunk = output.logits
            fresh = to_device([count > at for count in counts], chunk.device)
            logits = chunk if at == 0 else torch.where(fresh[:, None], chunk, logits)
            if self.head is not None:
                ended = [r for r, n in enumerate(left) if n and at + n == counts[r]]
                self._keep_own_states(ended, take, output.require_states())
        for r, row in enumerate(self.rows):
            if going[r]:
                runner.commit(r, len(row.tokens))
        return logits

    def _keep_own_states(self, ended: list[int], take: list[int], states: Tensor) -> None:
        """The head's own state of a row's last token stands in for the target's until a verdict brings that."""
        rows = [self.rows[r] for r in ended]
        places = [len(row.tokens) - 1 for row in rows]
        self.states.keep([row.index for row in rows], places, states, [(r, take[r]) for r in ended])
        for row in rows:
            row.known = len(row.tokens)

    def _inputs(self, starts: list[int], counts: list[int], width: int) -> Tensor:
        """Ids [B, width], or what a head's body is fed [B, width, hidden]."""
        padded = [
            (row.tokens[start : start + count] + [0] * width)[:width]
            for row, start, count in zip(self.rows, starts, counts, strict=True)
        ]
        ids = to_device(padded, self.runner.device)
        return ids if self.head is None else self.states.inputs(ids, [row.index for row in self.rows], starts)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns int64 [B], and q float32 [B, V'] where somebody asks for it."""
        params = self.spec.params
        if params.greedy:
            return argmax(logits), logits.float().softmax(-1) if self.spec.confidence else None
        device = logits.device
        q = probabilities(logits, params)
        keys = [[row.id, len(row.tokens), row.begin] for row in self.rows]
        ids, positions, begins = to_device(keys, device).unbind(1)
        streams = stream(self.role, begins)
        return draw(q, self.spec.seed, ids, positions, streams, self.head.vocabulary if self.head else None), q

    def _write_q(self, going: list[bool], q: Tensor) -> None:
        ring = self.arena["q"].shape[1]
        places = [(row.index, len(row.tokens) % ring) for row, go in zip(self.rows, going, strict=True) if go]
        if not all(going):
            q = q[to_device([r for r, go in enumerate(going) if go], q.device)]
        self.arena.write("q", [index for index, _ in places], [slot for _, slot in places], q)

    def _append(self, row: Row, tokens: list[int], sure_of: Sequence[float] | None) -> Block:
        """Draft `tokens`; `sure_of`: q's largest value and the token's, None for a copy."""
        start = len(row.tokens)
        top, own = (1.0, 1.0) if sure_of is None else sure_of
        row.tokens += tokens
        row.max_probs += [top] * len(tokens)
        row.token_probs += [own] * len(tokens)
        row.copied += [sure_of is None] * len(tokens)
        self.made += len(tokens)
        return self._block(row, start)
