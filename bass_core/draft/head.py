"""Drafts from a head that reads the target's hidden states (`HeadDrafter`).

The head is fed written tokens with the target's states, as soon as these states arrive (`observe_states`). It is
fed drafts with its own states, and accepted drafts again with the target's states. The head's pointer changes the
logits before a draft is drawn, so q includes it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
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
from ..model.graphs import GraphRunner
from ..model.pointer import SHORTEST
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import ColumnProbs, argmax, filters, largest, probabilities, scatter_columns
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.params import SamplingParams
from ..sample.rows import cat, stack
from ..sequence import Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import CommittedStates, Drafter, GreedyProbs, Proposal
from .chain_graph import MAX_UNREAD
from .head_graph import HeadChains
from .head_states import SettledStates, StandInStates
from .pending import CHUNK, feed_pending
from .texts import Texts, append_token, texts_for
from .tree import Fed, LevelStates, StaticTrees, TreeFeed

# A row continues drafting only while the probability of its drafts is at least this many times `confidence`,
# because a forward of the head costs more than one more token in a verification. No row depends on other rows
# here.
HEADROOM = 4.0
# Under greedy decoding, the confidence of a draft is its probability at temperature 1.
_PLAIN = SamplingParams(temperature=1.0)


class HeadDrafter(Drafter):
    """Drafts chains or trees with the pair's draft head.

    Whether a row continues drafting never depends on the token that is drawn next, so each draft is distributed as
    q.

    Args:
        runner: runs the head's body over its reduced vocabulary.
        size: V, the size of the target's vocabulary.
        confidence: limits the drafts of a row. Let P be the probability of the row's drafts so far, and p that of
            the likeliest next token. The row continues while P >= HEADROOM * confidence and P * p >= confidence.
            At 0 no row stops; above 1 / HEADROOM a row drafts at most one token. Ignored on an accelerator, where
            a wasted forward costs less than waiting for the device. There, only the length policy limits the
            drafts, in advance.
        ahead: for AMUSD, whose text runs ahead of the target's states. Until the target's state of a token
            arrives, the head uses its own state of that token; then the tokens after it are fed again. A proposal
            has at most one draft per row. It has none if a state is missing, for example after a copied token,
            which the head was not fed. A confidence above 0 doesn't stop a row, but adds `max_probs` and
            `token_probs` to the proposals.
        tree: shape of the trees to draft (StaticTrees), regardless of confidence. Not together with `ahead`.
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
        self.ahead, self._reports_q, self._began = ahead, ahead and confidence > 0, False
        # Ask for raw states, so that only the states that we draft from are normalised and projected.
        self.raw_states = not ahead
        self._source: SettledStates | StandInStates = SettledStates(0, head.config.hidden, runner.device)
        self._texts = texts_for(head, 0)
        # If `_inputs` is not None, our own kernels make the body's inputs and draft whole chains.
        inputs = head.compiled_inputs
        self._inputs = inputs if inputs is not None and runner.model.can_draft(inputs.fuse) else None
        self._chains: HeadChains | None = None
        self._in_one_call = self._inputs is not None and not (ahead or tree)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.runner.clear_rows()
        self._chains = None
        self._began, hidden = False, self.head.config.hidden
        self._texts = texts_for(self.head, len(rows))
        if self.ahead:
            self._source = StandInStates(len(rows), self.runner.cache.max_len, hidden, self.runner.device)
        else:
            self._source = SettledStates(len(rows), hidden, self.runner.device, self.head.readout().finish)
            if isinstance(self.runner, GraphRunner) and self.runner.captures and not self.branches:
                self._chains = HeadChains(
                    self.head,
                    self.runner,
                    len(rows),
                    self.size,
                    self.params,
                    self.role,
                    self.report_probs,
                )
        return None

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Let the body prepare forwards of one and of two tokens per row."""
        if self._chains is not None:
            return
        for width in (1, 2):
            ids = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            states = torch.zeros(rows, width, self.head.config.hidden, device=self.runner.device)
            fed = self.head.inputs(ids, states)
            self.runner.prepare(self._batch(fed, [0] * rows))

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Keep copies of the target's states, whose memory its next forward overwrites."""
        if self._chains is not None and self._observe_on_device(self._chains, rows, states):
            return
        for r, slot in (self._source.observe(states) or {}).items():
            self.runner.commit(r, min(self.runner.lengths[r], slot))

    @torch.inference_mode()
    def prepare_chains(self, rows: int, longest: int) -> None:
        """Capture the first round's chain."""
        if self._chains is not None:
            self._chains.prepare(rows, longest)

    def _observe_on_device(self, chains: HeadChains, rows: list[Sequence], states: Seq[Tensor]) -> bool:
        """Leave a round's states on the device, for the next captured chain; False if they have to be listed."""
        unread = chains.unread
        if isinstance(states, CommittedStates):
            full = self._began and not unread.takes(states)
            if full and self._gather_unread(rows) and chains.fits(rows, 0):
                # No round has drafted since the last one: feed what the rows have, to make room.
                chains.draft(rows, 0, RowKeys(0, [0] * len(rows), [0] * len(rows), self.runner.device))
            if not any(self._settled.waiting(len(rows))) and unread.takes(states):
                unread.append(states)
                return True
        self._spill(len(rows))
        return False

    def _gather_unread(self, rows: list[Sequence]) -> bool:
        """Bring the states of all unread tokens to the device's buffer; False if some are missing or too many."""
        assert self._chains is not None
        unread, waiting = self._chains.unread, self._settled.waiting(len(rows))
        needed = [len(row.tokens) - self.runner.lengths[r] for r, row in enumerate(rows)]
        if (
            any(waiting)
            and not any(unread.counts[: len(rows)])
            and waiting == needed
            and max(needed) <= MAX_UNREAD
        ):
            unread.fill(self._settled.take(waiting))
        return unread.counts[: len(rows)] == needed

    def _spill(self, rows: int) -> None:
        """Move the unread states from the device's buffer to the list of settled ones."""
        if self._chains is not None and any(self._chains.unread.counts[:rows]):
            self._settled.observe(self._chains.unread.pieces(rows))

    @property
    def _settled(self) -> SettledStates:
        assert isinstance(self._source, SettledStates)
        return self._source

    def _captured_chain(
        self, chains: HeadChains, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys
    ) -> Proposal | None:
        """Do the work of `propose` in one CUDA graph, or return None if it can't."""
        levels = max(max_drafts)
        if isinstance(keys, RowKeys) and self._gather_unread(rows) and chains.fits(rows, levels):
            drafted = chains.draft(rows, levels, keys)
            if drafted is not None:
                self.calls += levels
                self.drafted += sum(max_drafts)
                return drafted.proposal(max_drafts)
        self._spill(len(rows))
        return None

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts, whose states have been observed. These forwards don't count in `calls`."""
        self._read_prefixes(rows)
        ends = [len(row.prompt) for row in rows]
        if any(end > start for end, start in zip(ends, self.runner.lengths, strict=False)):
            self._catch_up(rows, [1] * len(rows), ends)
            self.calls = 0

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer a chain for each row; `unread` counts the tokens that the head has not been fed yet."""
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
        if self._chains is not None and (chain := self._captured_chain(self._chains, rows, max_drafts, keys)):
            return chain
        if self._in_one_call and (whole := self._whole_chain(rows, max_drafts, keys)) is not None:
            return whole
        logits, states = self._catch_up(rows, max_drafts)
        last = self._texts.upload(rows)
        ends = list(self.runner.lengths[: len(rows)])
        # allowed[step][r]: whether row r may draft in this step. The next lines make, per row: whether it still
        # drafts, its number of drafts, and their joint probability.
        allowed = [[most > step for most in max_drafts] for step in range(1 + max(max_drafts))]
        may_draft = to_device(allowed, logits.device)
        active, drafted = may_draft[0], torch.zeros_like(may_draft[0], dtype=torch.long)
        chain_prob = torch.ones(len(rows), device=logits.device)
        tokens, probs = list[Tensor](), list[Tensor]()
        greedy_probs = GreedyProbs(self.report_probs and self.params.greedy)
        for step in range(max(max_drafts)):
            if step:
                active = active & may_draft[step]
                if self.confidence:
                    active = active & (chain_prob >= HEADROOM * self.confidence)
                    if not active.any():
                        break
                logits, states = self._go_on(tokens[-1], states, [end + step - 1 for end in ends])
                last = append_token(last, tokens[-1][:, None])
            logits = self._texts.with_pointer(logits[:, None], states[:, None], last)[:, 0]
            q = self._distribution(logits)
            if q is not None and self.confidence:
                active = active & (chain_prob * largest(q)[1] >= self.confidence)
                if not active.any():
                    break
            column = self._draw(logits, q, keys, step)
            if q is not None and self.confidence:
                chain_prob = chain_prob * q.gather(1, column[:, None])[:, 0]
                drafted += active
            tokens.append(self.head.vocabulary[column])
            greedy_probs.keep(logits, column)
            if q is not None and not self.params.greedy:
                probs.append(q)
        num_drafted = drafted.tolist() if self.confidence else list(max_drafts)
        self.drafted += sum(num_drafted)
        width = max(num_drafted)
        if not width:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=logits.device), num_drafted)
        full = None
        if probs:
            full = scatter_columns(stack(probs[:width]), self.head.vocabulary, self.size).transpose(0, 1)
        proposal = Proposal(torch.stack(tokens[:width], dim=1), num_drafted, full, own=greedy_probs.getter(width))
        if self._reports_q and q is not None:
            proposal.max_probs, proposal.token_probs = largest(q)[1][:, None], q.gather(1, column[:, None])
        return proposal

    def _whole_chain(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal | None:
        """Do the work of `propose` in one compiled call, or return None if the tokens don't fit in one call."""
        from kernels.cpu.chain import NO_KEYS, Chain, Keys  # imports numba
        from kernels.cpu.sampling.calls import signed

        most, device = np.array(max_drafts, np.int64), self.runner.device
        levels, starts, ends = int(most.max()), self.runner.lengths[: len(rows)], [len(row.tokens) for row in rows]
        width, room = max(end - start for end, start in zip(ends, starts, strict=True)), self.runner.cache.room
        if width > CHUNK or room(starts) < width or room(ends) < levels:
            return None
        own_keys = NO_KEYS
        if not self.params.greedy:
            numbers = keys.sequence_ids, keys.positions, keys.stream(self.role)
            own_keys = Keys(signed(keys.seed), *(number.contiguous().numpy() for number in numbers))
        assert self._inputs is not None
        chain = Chain(
            most, self._inputs.fuse.packed, self._inputs.embedded.numpy(), self.head.vocabulary.numpy(), own_keys,
            None if self.params.greedy else filters(self.params), self.confidence, HEADROOM * self.confidence,
            soft=self.confidence > 0 or not self.params.greedy,
            keep=self.report_probs and self.params.greedy,
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
        greedy_probs = GreedyProbs(chain.keep)
        for level, column in enumerate(columns if chain.keep else ()):
            greedy_probs.keep(logits[level], column)
        full = None
        if width and not self.params.greedy:
            probs = torch.from_numpy(drafted.probs[:width]).transpose(0, 1)
            full = ColumnProbs(probs, self.head.vocabulary, self.head.columns_for(self.size))
        tokens = self.head.vocabulary[columns].t().contiguous().to(device)
        return Proposal(tokens, num_drafted, full, own=greedy_probs.getter(width))

    def _pointing(self, rows: list[Sequence]) -> Any:
        """Return the texts and the pointer's weights, in the form that the compiled chain takes."""
        from kernels.cpu.chain import Pointing  # imports numba

        assert isinstance(self._texts, Texts)
        lengths, pointer = np.array(self._texts.update(rows), np.int64), self.head.pointer
        weight, by_size = (weights.float().numpy() for weights in (pointer.weight, pointer.by_size))
        text, columns = self._texts.token_ids.numpy(), self.head.columns.numpy()
        return Pointing(text, lengths, columns, weight, by_size, SHORTEST)

    def _go_on(self, tokens: Tensor, states: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Feed draft tokens [B] at positions `starts`, given the previous states [B, hidden]."""
        output = self.runner.forward(self._batch(self.head.inputs(tokens[:, None], states[:, None]), starts))
        self.calls += 1
        return output.logits[:, -1], output.require_states()[:, -1]

    def _batch(self, x: Tensor, starts: list[int]) -> ForwardBatch:
        """Return the batch in which the body reads inputs x [B, S, hidden], from positions `starts` on."""
        return ForwardBatch(x, starts, return_states=True)

    @property
    def vocabulary(self) -> Tensor:
        """int64 [V'], the ids that the head can propose."""
        return self.head.vocabulary

    def root(self, rows: list[Sequence], wanted: list[bool]) -> Tensor:
        """Return the logits [B, V'] after the newest tokens (LevelModel in tree.py). Feeds all rows."""
        self._read_prefixes(rows)
        logits, states = self._catch_up(rows, [1] * len(rows))
        self._feed = TreeFeed(self.runner, list(self.runner.lengths[: len(rows)]))
        self._tree_states = LevelStates(states)
        last = self._texts.upload(rows)
        self._tree_last = LevelStates(last[:, 0])
        return self._texts.with_pointer(logits[:, None], states[:, None], last)[:, 0]

    def level(self, drafts: list[Fed], tokens: Tensor) -> Tensor:
        """Return the logits [B, W, V'] after these drafts, which are fed with their parents' states."""
        x = self.head.inputs(tokens, self._tree_states.before(drafts))
        output = self.runner.forward(self._feed.batch(drafts, x, return_states=True))
        self.calls += 1
        states = output.require_states()
        self._tree_states.add(drafts, states)
        last = append_token(self._tree_last.before(drafts), tokens)
        self._tree_last.add(drafts, last)
        return self._texts.with_pointer(output.logits, states, last)

    @property
    def room(self) -> int:
        """How many more drafts every row can be fed."""
        return self._feed.room

    def _read_prefixes(self, rows: list[Sequence]) -> None:
        """Feed each prefix that several prompts share once, unless the runner has it already."""
        runner, source = self.runner, self._source
        if self._began or not isinstance(source, SettledStates):
            return
        self._began = True
        prefixes = [runner.shared.of(row.prompt) for row in rows]
        needed = sorted({prefix for prefix in prefixes if prefix})
        if needed and not runner.has_prefixes(needed, with_states=False):
            counts = [len(prefix) for prefix in needed]
            padded = [list(prefix) + [0] * (max(counts) - len(prefix)) for prefix in needed]
            owners = [prefixes.index(prefix) for prefix in needed]
            pieces = [source.next(row, count) for row, count in zip(owners, counts, strict=True)]
            if self._inputs is not None:
                x = self._fused(self._inputs, needed, pieces)
            else:
                before = pad_sequence([source.finished(piece) for piece in pieces], batch_first=True)
                x = self.head.inputs(to_device(padded, runner.device), before)
            logits, _, _ = feed_pending(runner.prefix_runner(), x, [0] * len(needed), counts)
            runner.store_prefixes(needed, dict(enumerate(logits)), [torch.empty(0)] * len(needed))
        for r, prefix in enumerate(prefixes):
            runner.attach(r, prefix)
            source.skip(r, len(prefix))

    def _catch_up(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed the tokens since the last proposal, up to ends[r], in the rows that draft.

        Returns:
            Logits [B, V'] and states [B, hidden] of each row's last position.
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
        """Return inputs [B, S, hidden] for the unread tokens, and each row's first position and number of them."""
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
            # A row that drafts needs the logits after its newest token, so it feeds that token even if it was fed
            # before.
            starts = [min(runner.lengths[r], end - 1 if max_drafts[r] else end) for r, end in enumerate(ends)]
            counts = [ends[r] - start if max_drafts[r] else 0 for r, start in enumerate(starts)]
            before = source.read(starts, max(counts))
        width = max(counts)
        padded = [(row.tokens[start:] + [0] * width)[:width] for row, start in zip(rows, starts, strict=True)]
        return self.head.inputs(to_device(padded, runner.device), before), starts, counts

    def _fused(
        self, inputs: CompiledInputs, texts: Collection[Collection[int]], pieces: list[list[Tensor]]
    ) -> Tensor:
        """Return inputs [B, S, hidden] made from these tokens and the states before them, padded with zeros.

        `pieces` are each row's states as observed, raw or finished. A token's input depends only on the token and
        the state before it.
        """
        ids = torch.tensor([token for text in texts for token in text])
        states, size = [piece for row in pieces for piece in row], self.head.raw_size
        # The state before the first token of a text is already finished (zeros).
        padded = [piece if piece.shape[-1] == size else piece.new_zeros(len(piece), size) for piece in states]
        x, at = inputs(ids, cat(padded)), 0
        for piece in states:
            if piece.shape[-1] != size:
                x[at : at + len(piece)] = self.head.inputs(ids[at : at + len(piece)], piece)
            at += len(piece)
        return pad_sequence(list(x.split([len(text) for text in texts])), batch_first=True)

    def _distribution(self, logits: Tensor) -> Tensor | None:
        """Return q [B, V'] over the head's vocabulary, or None if neither the draw nor the proposal needs it."""
        if self.params.greedy:
            if is_accelerator(logits.device):
                return logits.float().softmax(-1) if self._reports_q else None
            return probabilities(logits, _PLAIN) if self.confidence or self._reports_q else None
        return probabilities(logits, self.params)

    def _draw(self, logits: Tensor, q: Tensor | None, keys: NoiseKeys, step: int) -> Tensor:
        """Draw or choose each row's next draft. Return its column in the head's vocabulary, int64 [B]."""
        if self.params.greedy or q is None:
            return argmax(logits)
        streams, ids = keys.stream(self.role), self.head.vocabulary
        return draw(q, keys.seed, keys.sequence_ids, keys.positions + step, streams, ids)

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """Do nothing: drafts don't stay in the cache, because accepted ones are fed again with target states."""

    def rewind(self, row: int, length: int) -> None:
        """Go back to `length` tokens: later positions will be fed again.

        Without `ahead`, their states will be observed again too.
        """
        if self._chains is not None:
            self._spill(len(self._chains.unread.counts))
        length_kept = min(self.runner.lengths[row], length)
        self.runner.commit(row, length_kept)
        self._texts.rewind(row, length)
        if isinstance(self._source, StandInStates):
            self._source.rewind(row, length)
        else:
            self._source.rewind(row, length - length_kept)

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
        self._source.move_row(source, target)
        self._texts.move_row(source, target)
        if self._chains is not None:
            self._chains.move_row(source, target)
