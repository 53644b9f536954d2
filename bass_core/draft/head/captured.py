"""Drafts a draft head's chains or trees in one CUDA graph per round, without a read on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ...model.draft_head import DraftHead
from ...model.graphs import GraphRunner
from ...model.prefill import PrefillSteps
from ...sample.noise import NoiseKeys, RowKeys
from ...sequence import Sequence
from ..base import CommittedStates, Proposal
from ..chain import Levels
from ..chain_graph import MAX_UNREAD, ChainGraphs, ChainInput, GraphChains, GraphDrafter
from .chain import HeadDrafter, head_levels
from .states import UnreadStates
from .texts import add_pointer, last_tokens


class CapturedHeadDrafter(GraphDrafter, HeadDrafter):
    """A HeadDrafter over a runner that captures.

    The target's states of a round stay on the device (UnreadStates), where the next graph reads them. The host
    lists them only if a graph can't be used. Then a round is drafted level by level.
    """

    runner: GraphRunner

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        head, runner = self.head, self.runner
        self.unread = UnreadStates(runner, head.config.hidden, head.body.dtype, len(rows))
        self._text = runner.device_text()
        model = _HeadModel(head, self._text.tokens, self.unread.states)
        options = self.size, self.params, self.role, self.report_probs, self.trees, self.advances
        self._graphs = ChainGraphs(runner, model, *options)
        return super().start(rows)

    def prepare(self, rows: int) -> None:
        """Do nothing: `prepare_chains` captures the rounds."""

    @torch.inference_mode()
    def prepare_chains(self, rows: int, longest: int) -> None:
        """Capture these rounds' graphs."""
        self._graphs.prepare(rows, longest)

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Leave a round's states on the device, for the next graph, or list them on the host."""
        unread = self.unread
        if isinstance(states, CommittedStates):
            if self.feed.began and not unread.takes(states):
                # No round has drafted since the last one: feed what the rows have, to make room.
                self._replay(rows, 0, RowKeys(0, [0] * len(rows), [0] * len(rows), self.runner.device))
            if not any(self.feed.states.waiting(len(rows))) and unread.takes(states):
                unread.append(states)
                return
        self._spill(len(rows))
        super().observe_states(rows, states)

    def read(self, rows: list[Sequence]) -> None:
        """Read the prompts. The state that a row's next token reads waits on the device, for the next graph."""
        super().read(rows)
        counts = self.feed.states.waiting(len(rows))
        if max(counts) <= MAX_UNREAD:
            self.unread.fill(self.feed.states.take(counts))

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        levels = max(max_drafts)
        drafted = self._replay(rows, levels, keys) if isinstance(keys, RowKeys) else None
        if drafted is not None:
            self.calls += levels
            self._newest = drafted.proposal(max_drafts)
            return self._newest
        self._spill(len(rows))
        return super()._draft(rows, max_drafts, keys)

    def _replay(self, rows: list[Sequence], levels: int, keys: RowKeys) -> GraphChains | None:
        """Draft `levels` levels in all rows; None if a state is missing, or if no graph can hold them."""
        runner, unread, batch = self.runner, self.unread, len(rows)
        starts = list(runner.lengths[:batch])
        texts = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        counts = list(map(len, texts))
        host = self.feed.states
        if not any(unread.counts[:batch]) and host.waiting(batch) == counts and max(counts) <= MAX_UNREAD:
            unread.fill(host.take(counts))
        if unread.counts[:batch] != counts or not self._graphs.fits(starts, counts, levels):
            return None
        self._text.upload(rows, starts)
        prompts, slots = [len(row.prompt) for row in rows], unread.state_slots[:batch]
        drafted = self._graphs.replay(levels, starts, texts, prompts, keys, slots)
        if drafted is not None:
            self.feed.commit(starts, counts)
            self._text.num_valid[:batch] = [len(row.tokens) for row in rows]
            unread.clear()
        return drafted

    def repeats(self, rows: list[Sequence], proposal: Proposal) -> bool:
        written = proposal.width + 1
        if proposal is not self._newest or written > MAX_UNREAD:
            return False
        return self._graphs.repeats([len(row.tokens) for row in rows], written)

    def propose_again(self, proposal: Proposal, packed: Tensor, states: Tensor | None) -> Proposal:
        assert states is not None
        self.unread.states[: len(states), : states.shape[1]].copy_(states)
        return super().propose_again(proposal, packed, states)

    def on_repeated(self, rows: list[Sequence]) -> None:
        for r, row in enumerate(rows):
            self.runner.commit(r, len(row.tokens))
            self._text.num_valid[r] = len(row.tokens)

    def _spill(self, rows: int) -> None:
        """Move the unread states from the device's buffer to the host's list."""
        if any(self.unread.counts[:rows]):
            self.feed.observe(self.unread.pieces(rows))

    def rewind(self, row: int, length: int) -> None:
        self._spill(len(self.unread.counts))
        super().rewind(row, length)
        self._text.num_valid[row] = min(self._text.num_valid[row], length)

    def move_row(self, source: int, target: int) -> None:
        super().move_row(source, target)
        self.unread.move_row(source, target)
        self._text.move_row(source, target)


class _HeadModel:
    """A draft head in a captured chain (ChainModel)."""

    # One width: a head is one layer, so that more padding costs less than more captures.
    reads_states, widths = True, (MAX_UNREAD,)

    def __init__(self, head: DraftHead, text: Tensor, states: Tensor) -> None:
        self.head, self.text, self.states = head, text, states

    @property
    def vocabulary(self) -> Tensor:
        return self.head.vocabulary

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.head.vocabulary),)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.head.parameters(), *self.head.buffers()]

    def most_kept(self, levels: int) -> int:
        # The head reads accepted drafts again, with the target's states.
        return 0

    def logits(self, unread: ChainInput) -> Levels:
        assert unread.state_slots is not None
        (rows, width), ends, head = unread.tokens.shape, unread.ends, self.head
        text, at = self.text[:rows], torch.arange(rows, device=ends.device)[:, None]
        unread.write(text)
        # Padding reads no state.
        is_unread = torch.arange(width, device=ends.device) < unread.counts[:, None]
        before = self.states[at, unread.state_slots].where(is_unread[..., None], 0.0)
        output = unread.forward(head.inputs(unread.tokens, before), unread.starts)
        newest = output.logits, output.require_states()
        logits, states = (unread.newest(values)[:, None] for values in newest)
        last = last_tokens(text, ends)[:, None]

        def with_pointer(logits: Tensor, states: Tensor, last: Tensor) -> Tensor:
            return add_pointer(head, logits, states, text, ends, last)

        return head_levels(head, logits, states, last, with_pointer, unread.feed)
