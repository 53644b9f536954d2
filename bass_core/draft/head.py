"""Drafts with a head that reads the target's hidden states.

Contract: a drafter (draft/base.py). A token that the target has settled is fed with the target's own state,
once that has arrived (`observe_states`); a drafted token is fed with the head's own state, and again with the
target's once it is settled. The head's pointer raises its logits before anything is drawn, so q has it in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.support import is_accelerator

from ..length.base import Offer
from ..machine.transfer import to_device
from ..model.draft_head import CompiledInputs, DraftHead
from ..model.forward import ForwardBatch
from ..model.pointer import SHORTEST
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import argmax, filters, largest, probabilities, spread
from ..sample.draw import draw
from ..sample.noise import NoiseKeys
from ..sample.noise import words as hashed
from ..sample.params import SamplingParams
from ..sample.rows import cat, stack
from ..sequence import Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import Drafter, OwnChances, Proposal
from .head_states import SettledStates, StandInStates
from .pending import CHUNK, feed_pending
from .texts import Texts, lengthened
from .tree import Fed, LevelStates, StaticTrees, TreeFeed

# A forward of the head costs more than one more token in a verification, so a row drafts on only while its drafts
# so far have this many times the confidence. Each row decides for itself and does not depend on its neighbours.
HEADROOM = 4.0
# What confidence is measured by.
_PLAIN = SamplingParams(temperature=1.0)


class HeadDrafter(Drafter):
    """`runner` drives the head's body over its reduced vocabulary; `size` is the target's V.

    confidence: a row drafts on while the head gives its drafts so far, times the likeliest next token, at least
    this probability, and the drafts so far HEADROOM times it (from 1 / HEADROOM on: one draft at most). Whether to
    draft on never depends on the token that is drawn next, so the token is distributed as q says. 0: never stop.
    On an accelerator no row stops: a wasted forward costs less than waiting for the device, and lengths are cut by
    the policy, before anything is drawn.

    ahead: the text runs ahead of the target's states, as in AMUSD. The head's own state of a token stands in until
    the target's is observed; what was fed after a stand-in is then fed again. A proposal has at most one draft a
    row, and none where a state is missing: after a token that the head was not fed, such as a copied one. A
    confidence above 0 stops nothing then, but the proposals have `max_probs` and `token_probs`.

    tree: makes trees of this shape (StaticTrees), whatever the confidence. Never beside `ahead`.
    """

    observes_states, source = True, "head"

    def __init__(
        self,
        head: DraftHead,
        runner: ModelRunner,
        size: int,
        params: SamplingParams,
        verification: Verification = AUTOMATIC,
        confidence: float = 0.0,
        ahead: bool = False,
        tree: tuple[int, ...] | None = None,
    ) -> None:
        self.head, self.runner, self.size, self.params = head, runner, size, params
        self.role = verification.draft_role
        self.branches, self._trees = tree is not None, StaticTrees(tree or (), params, self.role, size)
        self.confidence = 0.0 if ahead or is_accelerator(runner.device) else confidence
        self.ahead, self._tells, self._began = ahead, ahead and confidence > 0, False
        # Norms and projections of states that no draft is wanted after would be made for nothing.
        self.raw_states = not ahead
        self._source: SettledStates | StandInStates = SettledStates(0, head.config.hidden, runner.device)
        self._texts = Texts(head, 0)
        # Makes the body's inputs if our own kernels do, and drafts whole chains; a refresh does not replace it.
        inputs = head.compiled_inputs
        self._inputs = inputs if inputs is not None and runner.model.can_draft(inputs.fuse) else None
        self._in_one_call = self._inputs is not None and not (ahead or tree)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.runner.begin()
        self._began, hidden = False, self.head.config.hidden
        self._texts = Texts(self.head, len(rows))
        if self.ahead:
            self._source = StandInStates(len(rows), self.runner.cache.max_len, hidden, self.runner.device)
        else:
            self._source = SettledStates(len(rows), hidden, self.runner.device, self.head.readout().finish)
        return None

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Before the first step: let the body make ready for one token a row, and for two."""
        for width in (1, 2):
            ids = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            states = torch.zeros(rows, width, self.head.config.hidden, device=self.runner.device)
            fed = self.head.inputs(ids, states)
            self.runner.prepare(self._batch(fed, [0] * rows))

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Keep copies of the target's states, which its next forward overwrites."""
        for r, slot in (self._source.observe(states) or {}).items():
            self.runner.commit(r, min(self.runner.lengths[r], slot))

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts, whose states have been observed, for the prefill: `calls` does not count it."""
        self._read_prefixes(rows)
        ends = [len(row.prompt) for row in rows]
        if any(end > start for end, start in zip(ends, self.runner.lengths, strict=False)):
            self._catch_up(rows, [1] * len(rows), ends)
            self.calls = 0

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """A chain of each row; `unread` is what has been written since the head drafted last."""
        lengths = self.runner.lengths
        return [
            Offer(row.remaining - 1, self.source, unread=len(row.tokens) - length, row=row.id)
            for row, length in zip(rows, lengths, strict=False)
        ]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        if self.branches:
            trees = self._trees.propose(self, rows, max_drafts, keys)
            self.drafted += sum(trees.num_drafted)
            return trees
        if isinstance(self._source, StandInStates):
            complete = [self._source.complete(r, len(row.tokens)) for r, row in enumerate(rows)]
            max_drafts = [min(most, 1) if able else 0 for most, able in zip(max_drafts, complete, strict=True)]
            if max(max_drafts) == 0:
                return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=self.runner.device), max_drafts)
        self._read_prefixes(rows)
        if self._in_one_call and (whole := self._whole_chain(rows, max_drafts, keys)) is not None:
            return whole
        logits, states = self._catch_up(rows, max_drafts)
        last = self._texts.upload(rows)
        ends = list(self.runner.lengths[: len(rows)])
        # Row by row: in which steps it may draft, whether it still does, how much it has, and how likely that is.
        allowed = [[most > step for most in max_drafts] for step in range(1 + max(max_drafts))]
        room = to_device(allowed, logits.device)
        going, drafted = room[0], torch.zeros_like(room[0], dtype=torch.long)
        sure = torch.ones(len(rows), device=logits.device)
        tokens, probs = list[Tensor](), list[Tensor]()
        own = OwnChances(self.tells and self.params.greedy)
        for step in range(max(max_drafts)):
            if step:
                going = going & room[step]
                if self.confidence:
                    going = going & (sure >= HEADROOM * self.confidence)
                    if not going.any():
                        break
                logits, states = self._go_on(tokens[-1], states, [end + step - 1 for end in ends])
                last = lengthened(last, tokens[-1][:, None])
            logits = self._texts.raised(logits[:, None], states[:, None], last)[:, 0]
            q = self._distribution(logits)
            if q is not None and self.confidence:
                going = going & (sure * largest(q)[1] >= self.confidence)
                if not going.any():
                    break
            column = self._draw(logits, q, keys, step)
            if q is not None and self.confidence:
                sure = sure * q.gather(1, column[:, None])[:, 0]
                drafted += going
            tokens.append(self.head.vocabulary[column])
            own.keep(logits, column)
            if q is not None and not self.params.greedy:
                probs.append(q)
        num_drafted = drafted.tolist() if self.confidence else list(max_drafts)
        self.drafted += sum(num_drafted)
        width = max(num_drafted)
        if not width:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=logits.device), num_drafted)
        full = None
        if probs:
            full = spread(stack(probs[:width]), self.head.vocabulary, self.size).transpose(0, 1)
        proposal = Proposal(torch.stack(tokens[:width], dim=1), num_drafted, full, own=own.own(width))
        if self._tells and q is not None:
            proposal.max_probs, proposal.token_probs = largest(q)[1][:, None], q.gather(1, column[:, None])
        return proposal

    def _whole_chain(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal | None:
        """`propose` in one compiled call; None where the rows have to read more than one forward takes."""
        from kernels.cpu.chain import Chain  # imports numba

        most, device = np.array(max_drafts, np.int64), self.runner.device
        levels, starts, ends = int(most.max()), self.runner.lengths[: len(rows)], [len(row.tokens) for row in rows]
        width, room = max(end - start for end, start in zip(ends, starts, strict=True)), self.runner.cache.room
        if width > CHUNK or room(starts) < width or room(ends) < levels:
            return None
        words = np.zeros((2, levels, len(rows)), np.int64)
        if not self.params.greedy:
            at = keys.positions + torch.arange(levels)[:, None]
            words = torch.stack(hashed(keys.seed, keys.sequence_ids, at, keys.stream(self.role))[:2]).numpy()
        assert self._inputs is not None
        chain = Chain(
            most, self._inputs.fuse.packed, self._inputs.embedded.numpy(), self.head.vocabulary.numpy(), words,
            None if self.params.greedy else filters(self.params), self.confidence, HEADROOM * self.confidence,
            soft=self.confidence > 0 or not self.params.greedy,
            keep=self.tells and self.params.greedy,
            pointing=self._pointing(rows),
        )  # fmt: skip
        x, begins, counts = self._pending(rows, max_drafts)
        fed = ForwardBatch(x, begins, [max(count, 1) for count in counts])
        logits, drafted = self.runner.model.draft(fed, self.runner.cache, chain)
        for r, count in enumerate(counts):
            if count:
                self.runner.commit(r, ends[r])
        self.calls += drafted.forwards
        num_drafted = drafted.counts
        self.drafted += sum(num_drafted)
        width = max(num_drafted)
        columns = torch.from_numpy(drafted.columns[:width])
        own = OwnChances(chain.keep)
        for level, column in enumerate(columns if chain.keep else ()):
            own.keep(logits[level], column)
        full = None
        if width and not self.params.greedy:
            full = spread(torch.from_numpy(drafted.probs[:width]), self.head.vocabulary, self.size).transpose(0, 1)
        tokens = self.head.vocabulary[columns].t().contiguous().to(device)
        return Proposal(tokens, num_drafted, full, own=own.own(width))

    def _pointing(self, rows: list[Sequence]) -> Any:
        """The pointer as `_whole_chain` needs it."""
        from kernels.cpu.chain import Pointing  # imports numba

        lengths, pointer = np.array(self._texts.update(rows), np.int64), self.head.pointer
        weight, by_size = (one.float().numpy() for one in (pointer.weight, pointer.by_size))
        text, columns = self._texts.held.numpy(), self.head.columns.numpy()
        return Pointing(text, lengths, columns, weight, by_size, SHORTEST)

    def _go_on(self, tokens: Tensor, states: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Feed the drafts [B] at slots `starts`, behind states [B, hidden]."""
        output = self.runner.forward(self._batch(self.head.inputs(tokens[:, None], states[:, None]), starts))
        self.calls += 1
        return output.logits[:, -1], output.require_states()[:, -1]

    def _batch(self, x: Tensor, starts: list[int]) -> ForwardBatch:
        """What is fed to the body: x [B, S, hidden]."""
        return ForwardBatch(x, starts, return_states=True)

    @property
    def vocabulary(self) -> Tensor:
        """The ids that the head can propose."""
        return self.head.vocabulary

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Logits [B, V'] after the newest tokens (LevelModel in tree.py); all rows are fed."""
        self._read_prefixes(rows)
        logits, states = self._catch_up(rows, [1] * len(rows))
        self._feed = TreeFeed(self.runner, list(self.runner.lengths[: len(rows)]))
        self._tree_states = LevelStates(states)
        last = self._texts.upload(rows)
        self._tree_last = LevelStates(last[:, 0])
        return self._texts.raised(logits[:, None], states[:, None], last)[:, 0]

    def level(self, drafts: list[Fed], tokens: Tensor) -> Tensor:
        """Logits [B, W, V'] after these drafts, which are fed with their parents' states."""
        x = self.head.inputs(tokens, self._tree_states.before(drafts))
        output = self.runner.forward(self._feed.batch(drafts, x, return_states=True))
        self.calls += 1
        states = output.require_states()
        self._tree_states.add(drafts, states)
        last = lengthened(self._tree_last.before(drafts), tokens)
        self._tree_last.add(drafts, last)
        return self._texts.raised(output.logits, states, last)

    @property
    def room(self) -> int:
        """How many more drafts of any row can be fed."""
        return self._feed.room

    def _read_prefixes(self, rows: list[Sequence]) -> None:
        """Before a slot is fed: what several prompts begin with is fed once, unless the runner holds it."""
        runner, source = self.runner, self._source
        if self._began or not isinstance(source, SettledStates):
            return
        self._began = True
        prefixes = [runner.shared.of(row.prompt) for row in rows]
        needed = sorted({prefix for prefix in prefixes if prefix})
        if needed and not runner.holds(needed, with_states=False):
            counts = [len(prefix) for prefix in needed]
            padded = [list(prefix) + [0] * (max(counts) - len(prefix)) for prefix in needed]
            owners = [prefixes.index(prefix) for prefix in needed]
            pieces = [source.next(row, count) for row, count in zip(owners, counts, strict=True)]
            if self._inputs is not None:
                x = self._fused(self._inputs, needed, pieces)
            else:
                before = pad_sequence([source.finished(one) for one in pieces], batch_first=True)
                x = self.head.inputs(to_device(padded, runner.device), before)
            logits, _, _ = feed_pending(runner.over_prefix(), x, [0] * len(needed), counts)
            runner.hold(needed, dict(enumerate(logits)), [torch.empty(0)] * len(needed))
        for r, prefix in enumerate(prefixes):
            runner.attach(r, prefix)
            source.skip(r, len(prefix))

    def _catch_up(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed what came since the last proposal; logits [B, V'], states [B, hidden] of the last slots.

        Rows that draft are fed, up to ends[r].
        """
        runner, ends = self.runner, ends or [len(row.tokens) for row in rows]
        x, starts, counts = self._pending(rows, max_drafts, ends)
        logits, states, forwards = feed_pending(runner, x, starts, counts, True)
        assert states is not None
        self.calls += forwards
        fed = [r for r, count in enumerate(counts) if count]
        for r in fed:
            runner.commit(r, ends[r])
        if isinstance(self._source, StandInStates):
            self._source.keep(fed, [ends[r] for r in fed], states[to_device(fed, states.device)])
        return logits, states

    def _pending(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[Tensor, list[int], list[int]]:
        """What came since the last proposal: inputs [B, S, hidden], and each row's first slot and how many."""
        runner, source = self.runner, self._source
        ends = ends or [len(row.tokens) for row in rows]
        if isinstance(source, SettledStates):
            starts = list(runner.lengths[: len(rows)])
            rows_fed = zip(ends, starts, max_drafts, strict=True)
            counts = [end - start if most else 0 for end, start, most in rows_fed]
            if self._inputs is not None:
                texts = [row.tokens[start : start + n] for row, start, n in zip(rows, starts, counts, strict=True)]
                return self._fused(self._inputs, texts, source.take(counts)), starts, counts
            before = source.read(counts)
        else:
            # A row that drafts feeds its newest token, if need be again, for the logits after it.
            starts = [min(runner.lengths[r], end - 1 if max_drafts[r] else end) for r, end in enumerate(ends)]
            counts = [ends[r] - start if max_drafts[r] else 0 for r, start in enumerate(starts)]
            before = source.read(starts, max(counts))
        width = max(counts)
        padded = [(row.tokens[start:] + [0] * width)[:width] for row, start in zip(rows, starts, strict=True)]
        return self.head.inputs(to_device(padded, runner.device), before), starts, counts

    def _fused(
        self, inputs: CompiledInputs, texts: Collection[Collection[int]], pieces: list[list[Tensor]]
    ) -> Tensor:
        """Inputs [B, S, hidden] of these tokens and of the states before them, zeros after a row's last.

        pieces: of each row, as they were observed. A token's input depends on nothing beside it.
        """
        ids = torch.tensor([token for text in texts for token in text])
        states, size = [one for row in pieces for one in row], self.head.raw_size
        # Nothing stands before the first token of a text, whose state is there already.
        whole = [one if one.shape[-1] == size else one.new_zeros(len(one), size) for one in states]
        made, at = inputs(ids, cat(whole)), 0
        for one in states:
            if one.shape[-1] != size:
                made[at : at + len(one)] = self.head.inputs(ids[at : at + len(one)], one)
            at += len(one)
        return pad_sequence(list(made.split([len(text) for text in texts])), batch_first=True)

    def _distribution(self, logits: Tensor) -> Tensor | None:
        """q [B, V'] over the head's vocabulary, where somebody asks for it."""
        if self.params.greedy:
            if is_accelerator(logits.device):
                return logits.float().softmax(-1) if self._tells else None
            return probabilities(logits, _PLAIN) if self.confidence or self._tells else None
        return probabilities(logits, self.params)

    def _draw(self, logits: Tensor, q: Tensor | None, keys: NoiseKeys, step: int) -> Tensor:
        """A column of the head's vocabulary a row."""
        if self.params.greedy or q is None:
            return argmax(logits)
        streams, ids = keys.stream(self.role), self.head.vocabulary
        return draw(q, keys.seed, keys.sequence_ids, keys.positions + step, streams, ids)

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """Does nothing: drafted tokens lie after what counts in the cache, and are fed again with true states."""

    def rewind(self, row: int, length: int) -> None:
        """Slots from `length` on are fed again; without `ahead`, with states that are observed again."""
        kept = min(self.runner.lengths[row], length)
        self.runner.commit(row, kept)
        self._texts.rewind(row, length)
        if isinstance(self._source, StandInStates):
            self._source.rewind(row, length)
        else:
            self._source.rewind(row, length - kept)

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
        self._source.move_row(source, target)
        self._texts.move_row(source, target)
