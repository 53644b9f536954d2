"""The draft's side of AMUSD: rows that are drafted ahead of the agreed text, one token each a step.

Contract: `step` runs one forward for all rows that may go on (or one chunk of prefill) and returns what it
drafted; `judge` takes the target's verdict. A row rolls back only where its text differs from the verdict's; what
it drafted beyond that stays, and is announced anew under the new epoch. Each token is drawn with the noise of
(seed, sequence id, position, role), from the q that is written beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .amusd_arena import Arena
from .amusd_link import Block, Open, RowVerdict
from .draft_head import DraftHead
from .noise import Role
from .runner import ModelRunner, PrefillSteps
from .sampling import draw, probabilities
from .step_model import StepModel

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
    tops: list[float] = field(default_factory=list)
    owns: list[float] = field(default_factory=list)


class DraftSession:
    """One request. `model` is the draft's, `head` the draft head that it is the body of, if it is one."""

    def __init__(self, spec: Open, arena: Arena, model: StepModel, head: DraftHead | None, vocab: int) -> None:
        self.spec, self.arena, self.head = spec, arena, head
        length = max(spec.ends) + 2 * spec.lead + CHUNK
        outputs = vocab if head is None else len(head.vocabulary)
        self.runner = ModelRunner(
            model, len(spec.prompts), length, outputs, spec.backend, keep_states=head is not None
        )
        limit = model.context
        self.rows = [
            Row(index, spec.sequence_ids[index], min(spec.ends[index], limit), list(prompt), len(prompt))
            for index, prompt in enumerate(spec.prompts)
        ]
        self.made = self.rolled_back = 0
        self.role = Role.TARGET if spec.rule == "coupled" else Role.DRAFT
        self._prefill: PrefillSteps | None = None
        self._early: list[RowVerdict] = []
        if head is None:
            self._prefill = self.runner.prefill([prompt[:limit] for prompt in spec.prompts])
        else:
            # What slot t reads: the state of token t - 1, the target's own where it is known.
            size = (len(spec.prompts), max(spec.ends) + 1, head.config.hidden)
            self.states = torch.zeros(size, device=model.device)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prefill is not None or any(self._may_draft(row) for row in self.rows)

    def _may_draft(self, row: Row) -> bool:
        # A head can't say anything before the first verdict has brought the prompt's states.
        known = self.head is None or row.epoch > 0
        return known and len(row.tokens) < row.end and len(row.tokens) - row.agreed < self.spec.lead

    def judge(self, verdicts: list[RowVerdict]) -> list[Block]:
        """Take over what the target decided; the drafts that survive a new epoch, to be announced again."""
        if self._prefill is not None:  # rows keep their places until their prompts are in the cache
            self._early += verdicts
            return []
        blocks = [self._judge_row(verdict) for verdict in verdicts]
        return [block for block in blocks if block is not None]

    def _judge_row(self, verdict: RowVerdict) -> Block | None:
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
            self.runner.cached[place] = min(self.runner.cached[place], at)
            row.tops, row.owns = [], []
        else:
            del row.tops[:same], row.owns[:same]
        row.agreed = end
        if self.head is not None:
            self._read_states(place, verdict.start, end)
        if verdict.epoch == row.epoch:
            return None
        row.epoch = verdict.epoch
        kept = row.tokens[end:]
        return Block(row.index, row.epoch, end, kept, list(row.tops), list(row.owns)) if kept else None

    def _read_states(self, place: int, start: int, end: int) -> None:
        """The target's states of all agreed tokens but the newest are known: slots behind them are fed anew."""
        row = self.rows[place]
        first = 0 if row.epoch == 0 else start - 1
        self.states[row.index, first : end - 1] = self.arena["states"][row.index, first : end - 1].to(
            self.states.device
        )
        self.runner.cached[place] = min(self.runner.cached[place], first + 1 if first else 0)

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
        going = [self._may_draft(row) for row in self.rows]
        logits = self._feed(going)
        columns, q = self._draw(logits)
        tokens = columns if self.head is None else self.head.vocabulary[columns]
        drawn = [tokens.tolist()]
        if q is not None:
            drawn += torch.stack((q.amax(-1), q.gather(-1, columns[:, None])[:, 0])).tolist()
        if "q" in self.arena and q is not None:
            self._write_q(going, q)
        return [self._append(row, [one[r] for one in drawn]) for r, row in enumerate(self.rows) if going[r]]

    def _prefill_step(self, prefill: PrefillSteps) -> list[Block]:
        prefill.step()
        if not prefill.done:
            return []
        self._prefill = None
        # The last prompt token is fed once more, for the logits behind it.
        self.runner.cached = [cached - 1 for cached in self.runner.cached]
        early, self._early = self._early, []
        return self.judge(early)

    def _feed(self, going: list[bool]) -> Tensor:
        """Logits [B, V'] behind each row's last token; a row that does not go on is fed as padding."""
        runner, batch = self.runner, len(self.rows)
        starts = runner.cached[:batch]
        counts = [
            len(row.tokens) - start if go else 0 for row, start, go in zip(self.rows, starts, going, strict=True)
        ]
        logits = torch.empty(0)
        for at in range(0, max(counts), CHUNK):
            width = min(max(counts) - at, CHUNK)
            left = [max(0, min(count - at, width)) for count in counts]
            begins = [start + min(at, count) for start, count in zip(starts, counts, strict=True)]
            take = [max(count - 1, 0) for count in left]
            chunk = runner.feed_ids(self._inputs(begins, left, width), begins, take)
            fresh = torch.tensor([count > at for count in counts], device=chunk.device)
            logits = chunk if at == 0 else torch.where(fresh[:, None], chunk, logits)
            if self.head is not None:
                assert runner.states is not None
                for r, row in enumerate(self.rows):
                    # The head's own state stands in for the target's until a verdict brings that.
                    if left[r] and at + left[r] == counts[r]:
                        self.states[row.index, len(row.tokens) - 1] = runner.states[r, take[r]].float()
        for r, row in enumerate(self.rows):
            if going[r]:
                runner.cached[r] = len(row.tokens)
        return logits

    def _inputs(self, starts: list[int], counts: list[int], width: int) -> Tensor:
        """Ids [B, width], or what a head's body is fed [B, width, hidden]."""
        padded = [
            (row.tokens[start : start + count] + [0] * width)[:width]
            for row, start, count in zip(self.rows, starts, counts, strict=True)
        ]
        ids = torch.tensor(padded, device=self.runner.device)
        if self.head is None:
            return ids
        before = torch.zeros(len(padded), width, self.head.config.hidden, device=self.runner.device)
        for r, (row, start, count) in enumerate(zip(self.rows, starts, counts, strict=True)):
            skip = 1 if start == 0 else 0
            if count > skip:
                before[r, skip:count] = self.states[row.index, start + skip - 1 : start + count - 1]
        return self.head.inputs(ids, before)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns int64 [B], and q float32 [B, V'] where somebody asks for it."""
        params = self.spec.params
        if params.greedy:
            return logits.argmax(-1), logits.float().softmax(-1) if self.spec.confidence else None
        device = logits.device
        q = probabilities(logits, params)
        ids = torch.tensor([row.id for row in self.rows], device=device)
        positions = torch.tensor([len(row.tokens) for row in self.rows], device=device)
        roles = torch.full_like(positions, int(self.role))
        return draw(q, self.spec.seed, ids, positions, roles, self.head.vocabulary if self.head else None), q

    def _write_q(self, going: list[bool], q: Tensor) -> None:
        shared = self.arena["q"]
        for r, row in enumerate(self.rows):
            if going[r]:
                shared[row.index, len(row.tokens) % shared.shape[1]] = q[r].to(shared.device)

    def _append(self, row: Row, drawn: list[float]) -> Block:
        token, confidence = int(drawn[0]), drawn[1:]
        start = len(row.tokens)
        row.tokens.append(token)
        self.made += 1
        if confidence:
            row.tops.append(confidence[0])
            row.owns.append(confidence[1])
        return Block(row.index, row.epoch, start, [token], row.tops[-1:], row.owns[-1:])
