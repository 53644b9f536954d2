"""A draft head's captured chains (chain_graph.py): `HeadChains`.

The graphs read the target's states from `UnreadStates`, where `observe_states` leaves them on the device. They
search the texts in a buffer to which they append the tokens that they are fed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..model.device_text import DeviceText
from ..model.draft_head import DraftHead
from ..model.graphs import GraphRunner
from ..sample.noise import Role, RowKeys
from ..sample.params import SamplingParams
from ..sequence import Sequence
from .base import CommittedStates
from .chain_graph import MAX_UNREAD, ChainGraphs, Drafted, Unread
from .texts import add_pointer, append_token, last_tokens


class UnreadStates:
    """The states before each row's unread tokens, on the device: the first counts[r] of row r.

    They come from the target's rounds. SettledStates has those of the prompts.
    """

    def __init__(self, runner: GraphRunner, hidden: int, dtype: torch.dtype, rows: int) -> None:
        self.states = runner.buffer("unread", runner.cache.max_batch, MAX_UNREAD, hidden, dtype=dtype)
        self.counts = [0] * rows

    def takes(self, states: CommittedStates) -> bool:
        """Return whether the states of a round's tokens can be copied at once, after those of each row."""
        batch, width = states.states.shape[:2]
        alike = len(set(self.counts[:batch])) == 1
        return alike and states.chains and self.counts[0] + width <= MAX_UNREAD

    def append(self, states: CommittedStates) -> None:
        """Copy the states of a round's tokens, if `takes` allows it."""
        batch, width = states.states.shape[:2]
        at = self.counts[0]
        self.states[:batch, at : at + width].copy_(states.states)
        for r, path in enumerate(states.paths):
            self.counts[r] += len(path) + 1

    def fill(self, pieces: list[list[Tensor]]) -> None:
        """Copy each row's states from pieces [k, hidden]."""
        for r, row in enumerate(pieces):
            at = 0
            for piece in row:
                self.states[r, at : at + len(piece)].copy_(piece)
                at += len(piece)
            self.counts[r] = at

    def pieces(self, rows: int) -> list[Tensor]:
        """Forget the states of the first rows, and return them, which stay valid until new ones come."""
        pieces = [self.states[r, :count] for r, count in enumerate(self.counts[:rows])]
        self.counts[:rows] = [0] * rows
        return pieces

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        if self.counts[source]:
            self.states[target].copy_(self.states[source])
        self.counts[target] = self.counts[source]


class HeadChains:
    """Drafts chains of one request with a draft head.

    Args:
        head: the draft head.
        runner: runs its body.
        rows: the rows of the request.
        size: V, the size of the target's vocabulary.
        params: how drafts are sampled.
        role: their noise.
        reports: whether greedy drafts come with their probabilities.
    """

    def __init__(
        self,
        head: DraftHead,
        runner: GraphRunner,
        rows: int,
        size: int,
        params: SamplingParams,
        role: Role,
        reports: bool,
    ) -> None:
        self.runner = runner
        self.unread = UnreadStates(runner, head.config.hidden, head.body.dtype, rows)
        self._text = DeviceText(runner)
        model = _HeadModel(head, self._text.tokens, self.unread.states)
        self._graphs = ChainGraphs(runner, model, size, params, role, reports)

    def fits(self, rows: list[Sequence], levels: int) -> bool:
        """Return whether one graph can feed all unread tokens and draft `levels` tokens."""
        starts = list(self.runner.lengths[: len(rows)])
        counts = [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
        return self._graphs.fits(starts, counts, levels)

    def draft(self, rows: list[Sequence], levels: int, keys: RowKeys) -> Drafted | None:
        """Feed the unread tokens of all rows, whose states `unread` has, and draft `levels` tokens in each.

        Returns:
            The drafts, valid until the next call; None if this graph can't be captured.
        """
        starts = list(self.runner.lengths[: len(rows)])
        self._text.upload(rows, starts)
        unread = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        drafted = self._graphs.replay(levels, starts, unread, [len(row.prompt) for row in rows], keys)
        if drafted is None:
            return None
        for r, row in enumerate(rows):
            self.runner.commit(r, len(row.tokens))
            self._text.known[r], self.unread.counts[r] = len(row.tokens), 0
        return drafted

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the first round's graph, for rows that have nothing but one unread token."""
        self._graphs.prepare(rows, levels)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.unread.move_row(source, target)
        self._text.move_row(source, target)


class _HeadModel:
    """A draft head in a captured chain (ChainModel)."""

    reads_states = True

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

    def logits(self, unread: Unread) -> Generator[Tensor, Tensor, None]:
        rows, width = unread.tokens.shape
        text, ends, level = self.text[:rows], unread.ends, 0
        unread.write(text)
        # After a row's unread states, the buffer has those of earlier rounds.
        is_unread = torch.arange(width, device=text.device) < unread.counts[:, None]
        before = self.states[:rows, :width].where(is_unread[..., None], 0.0)
        output = unread.forward(self.head.inputs(unread.tokens, before), unread.starts)
        logits, states = unread.newest(output.logits), unread.newest(output.require_states())
        last = last_tokens(text, ends)
        while True:
            drafts = yield add_pointer(self.head, logits, states, text, ends, last)
            output = unread.forward(self.head.inputs(drafts[:, None], states[:, None]), ends + level)
            logits, states = output.logits[:, -1], output.require_states()[:, -1]
            last, level = append_token(last, drafts), level + 1
