"""The draft's side of AMUSD: drafts rows ahead of the agreed text, with any drafter that runs the draft.

Contract: `step` calls the drafter once for all rows that may go on (or runs one chunk of prefill) and returns what
was drafted: per row one token of the model, or a copied run. `judge` takes the target's verdicts. A proposal
becomes part of the row's text at once. A row rolls back only from where its text differs from the verdict's; if it
agrees, its drafts beyond the verdict stay, and are sent again if the epoch is new. Each token is drawn with the
noise of (seed, sequence id, position, where the epoch began), from the q that is written to the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.support import is_accelerator, runtime

from ..drafting.base import Proposal
from ..drafting.pending import CHUNK
from ..drafting.registry import DRAFTERS, DraftSource, Parts, confident_prefix, make_drafter
from ..engine.prefill import PrefillSteps
from ..engine.prefix import CachedTexts
from ..machine.transfer import to_device
from ..models.draft_head import DraftHead
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence
from .messages import Block, Open, RowUpdate
from .shared_memory import Arena


@dataclass
class Row(Sequence):
    """A row as the drafter sees it: `tokens` is the agreed text of length `agreed`, then the drafts."""

    # The most tokens it may have, also limited by the draft's context.
    end: int = 0
    agreed: int = 0
    epoch: int = 0
    # Position where the epoch began, as far as the draft knows.
    begin: int = 0
    # For each draft, as in Block.
    max_probs: list[float] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    # The drafter had nothing to propose, so it is not asked again before the next verdict.
    silent: bool = False


class DraftSession:
    """One request, drafted with the draft of `source`; large tensors go through `arena`."""

    def __init__(self, spec: Open, arena: Arena, source: DraftSource) -> None:
        self.spec, self.arena, self.device = spec, arena, source.device
        self._head = source.draft if isinstance(source.draft, DraftHead) else None
        # A copied run is proposed whole; the model drafts one token per step, so verdicts are read in between.
        kind = DRAFTERS[spec.drafter]
        self._most, self._confidence = spec.lead if kind.copies else 1, kind.stops_when_unsure
        assert source.draft_step is not None
        limit = source.draft_step.context
        given = enumerate(zip(spec.sequence_ids, spec.prompts, spec.ends, strict=True))
        self.rows = [
            Row(index, id_, list(prompt), end - len(prompt), frozenset(), end=min(end, limit), agreed=len(prompt))
            for index, (id_, prompt, end) in given
        ]
        self.made = self.rolled_back = 0
        # Room for drafts that are not kept, and for a chunk of padding after the longest row.
        texts = CachedTexts(spec.prompts, [end + 2 * spec.lead + CHUNK for end in spec.ends])
        parts = Parts(source, len(self.rows), texts, spec.backend, spec.params, spec.verification, ahead=True)
        self.drafter = make_drafter(spec.drafter, parts)
        self._prefill: PrefillSteps | None = self.drafter.start(list(self.rows))
        self._early: list[RowUpdate] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prefill is not None or any(self._max_drafts(row) for row in self.rows)

    def _max_drafts(self, row: Row) -> int:
        ahead = len(row.tokens) - row.agreed
        # The target would not look at a draft after an unsure one.
        unsure = self._confidence and confident_prefix(row.max_probs, row.token_probs) < ahead
        if unsure or row.silent:
            return 0
        return max(0, min(row.end - len(row.tokens), self.spec.lead - ahead, self._most))

    def judge(self, verdicts: list[RowUpdate]) -> list[Block]:
        """Apply the target's verdicts; returns the drafts that survive a new epoch, to be sent again."""
        if self._prefill is not None:  # rows keep their places until their prompts are in the cache
            self._early += verdicts
            return []
        blocks = [self._judge_row(verdict) for verdict in verdicts]
        if self.drafter.observes_states:
            self._hand_states({verdict.row: verdict for verdict in verdicts})
        return [block for block in blocks if block is not None]

    def _judge_row(self, verdict: RowUpdate) -> Block | None:
        place = next(r for r, row in enumerate(self.rows) if row.index == verdict.row)
        if verdict.finished:
            self._forget(place)
            return None
        row = self.rows[place]
        row.silent = False
        assert verdict.start == row.agreed, "a verdict continues the agreed text"
        end = verdict.start + len(verdict.tokens)
        same = 0
        for ours, theirs in zip(row.tokens[verdict.start : end], verdict.tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(verdict.tokens):
            at = verdict.start + same
            if at < len(row.tokens):
                self.rolled_back += 1
                del row.tokens[at:]
                self.drafter.rewind(place, at)
            row.tokens += verdict.tokens[same:]
            row.max_probs, row.token_probs, row.copied = [], [], []
        else:
            del row.max_probs[:same], row.token_probs[:same], row.copied[:same]
        row.agreed = end
        if verdict.epoch == row.epoch:
            return None
        row.epoch, row.begin = verdict.epoch, end
        return self._block(row, end) if len(row.tokens) > end else None

    def _hand_states(self, verdicts: dict[int, RowUpdate]) -> None:
        """Give the drafter the target's states of the agreed tokens; each row's newest token has none yet."""
        spans = []
        for row in self.rows:
            verdict = verdicts.get(row.index)
            # The previous verdict brought the states up to, but not including, its own newest token.
            first = 0 if verdict is None or verdict.start == len(row.prompt) else verdict.start - 1
            spans.append((row.index, first, first if verdict is None else row.agreed - 1))
        counts = [stop - first for _, first, stop in spans]
        if sum(counts):
            rows = [index for index, first, stop in spans for _ in range(first, stop)]
            places = [at for _, first, stop in spans for at in range(first, stop)]
            states, reader = self.arena.read("states", rows, places, self.device), self.drafter
            reader.observe_states(list(self.rows), list(states.split(counts)))

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

    def close(self) -> None:
        """Wait for all queued work, so that the next user of the request's memory may write to it."""
        if is_accelerator(self.device):
            runtime(self.device).current_stream(self.device).synchronize()

    def _forget(self, place: int) -> None:
        last = self.rows.pop()
        if place < len(self.rows):
            self.drafter.move_row(len(self.rows), place)
            self.rows[place] = last

    @torch.inference_mode()
    def step(self) -> list[Block]:
        """One chunk of prefill, or one proposal for every row that may go on."""
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        rows, max_drafts = list[Sequence](self.rows), [self._max_drafts(row) for row in self.rows]
        proposal = self.drafter.propose(rows, max_drafts, self._keys())
        for row, most, count in zip(self.rows, max_drafts, proposal.num_drafted, strict=True):
            row.silent = row.silent or (most > 0 and count == 0)
        if max(proposal.num_drafted) == 0:
            return []
        if proposal.probs is not None and "q" in self.arena:
            self._write_q(proposal, proposal.probs)
        blocks = self._take(proposal)
        # Tell the drafter that all drafts but the last were accepted, and that the last is the target's own token.
        self.drafter.on_verified(rows, proposal, [max(0, count - 1) for count in proposal.num_drafted])
        return blocks

    def _prefill_step(self, prefill: PrefillSteps) -> list[Block]:
        prefill.step()
        if not prefill.done:
            return []
        self._prefill = None
        early, self._early = self._early, []
        return self.judge(early)

    def _keys(self) -> NoiseKeys:
        keys = [[row.id, len(row.tokens), row.begin] for row in self.rows]
        return NoiseKeys(self.spec.seed, *to_device(keys, self.device).unbind(1))

    def _write_q(self, proposal: Proposal, probs: Tensor) -> None:
        """Write the q of each row's draft; none for copies, whose q is a point mass."""
        ring, drawn = self.arena["q"].shape[1], _drawn(proposal)
        if drawn:
            q = probs[:, 0] if len(drawn) == len(self.rows) else probs[to_device(drawn, probs.device), 0]
            if self._head is not None:
                q = q[:, self._head.vocabulary]
            places = [(row.index, len(row.tokens) % ring) for row in (self.rows[r] for r in drawn)]
            self.arena.write("q", [index for index, _ in places], [slot for _, slot in places], q)

    def _take(self, proposal: Proposal) -> list[Block]:
        """Append the proposed tokens to their rows' texts; returns them as blocks."""
        drafts, drawn = proposal.tokens.tolist(), _drawn(proposal)
        sure = {r: (1.0, 1.0) for r in range(len(self.rows))}
        if drawn and proposal.max_probs is not None and proposal.token_probs is not None:
            told = torch.stack((proposal.max_probs[:, 0], proposal.token_probs[:, 0]), dim=-1).tolist()
            sure |= {r: told[r] for r in drawn}
        blocks = []
        for r, (row, count) in enumerate(zip(self.rows, proposal.num_drafted, strict=True)):
            if count:
                start = len(row.tokens)
                row.tokens += drafts[r][:count]
                row.max_probs += [sure[r][0]] * count
                row.token_probs += [sure[r][1]] * count
                row.copied += [r not in drawn] * count
                blocks.append(self._block(row, start))
        self.made += sum(proposal.num_drafted)
        return blocks


def _drawn(proposal: Proposal) -> list[int]:
    """The rows for which the model drew a token."""
    copied = proposal.copied or [False] * len(proposal.num_drafted)
    return [r for r, count in enumerate(proposal.num_drafted) if count and not copied[r]]
