"""Chains of a draft head in one CUDA graph, from the tokens that it has not read yet to its last draft.

The graph reads the target's states from `Unread`, where `observe_states` leaves them on the device, and searches
the texts in a buffer to which it appends what it is fed. So a round sends one packed tensor of numbers to the
device and reads nothing. Rows that draft nothing are fed as well, which costs no more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends import captured_extent

from ..model.draft_head import DraftHead
from ..model.forward import CapturedBatch
from ..model.graphs import GraphRunner
from ..sample.distribution import argmax, probabilities, scatter_columns
from ..sample.draw import draw
from ..sample.noise import Role, RowKeys, stream
from ..sample.params import SamplingParams
from ..sequence import Sequence
from .base import CommittedStates
from .texts import NoTexts, Texts, add_pointer, append_token, last_tokens

# The most tokens of a row that one graph feeds, and the widths that are captured: a round's unread tokens are fed
# in the narrowest that holds them.
MAX_UNREAD = 17
_WIDTHS = (2, 5, 9, MAX_UNREAD)


class Drafted(NamedTuple):
    """The outputs of a graph, for all of its rows.

    Attributes:
        tokens: int64 [R, l].
        probs: float32 [R, l, V], the distributions that they were drawn from; None for greedy drafts.
        chances: float32 [R, l], each greedy draft's probability at temperature 1, if wanted.
    """

    tokens: Tensor
    probs: Tensor | None
    chances: Tensor | None


class Unread:
    """The states before each row's unread tokens, on the device: the first counts[r] of row r.

    They come from the target's rounds; what it read of the prompts, SettledStates has.
    """

    def __init__(self, runner: GraphRunner, hidden: int, dtype: torch.dtype, rows: int) -> None:
        self.states = runner.buffer("unread", runner.cache.max_batch, MAX_UNREAD, hidden, dtype=dtype)
        self.counts = [0] * rows

    def takes(self, states: CommittedStates) -> bool:
        """Return whether the states of a round's tokens can be copied at once, behind what each row has."""
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


class CapturedChains:
    """Drafts chains of one request, in graphs that belong to the cache of `runner`.

    Args:
        head: the draft head.
        runner: runs its body.
        texts: the rows' texts on the host.
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
        texts: Texts | NoTexts,
        rows: int,
        size: int,
        params: SamplingParams,
        role: Role,
        reports: bool,
    ) -> None:
        self.head, self.runner, self.texts, self.size = head, runner, texts, size
        self.params, self.role, self.reports = params, role, reports and params.greedy
        self.unread = Unread(runner, head.config.hidden, head.body.dtype, rows)
        # The texts on the device have as many columns as a row can have tokens, and room for a wide step.
        prefix = 0 if runner.cache.prefix is None else runner.cache.prefix.max_len
        columns = runner.cache.max_len + prefix + MAX_UNREAD
        self._text = runner.buffer("text", runner.cache.max_batch, columns, dtype=torch.long)
        # Per row: how many tokens of its text are on the device.
        self._uploaded = [0] * rows

    def fits(self, rows: list[Sequence], levels: int) -> bool:
        """Return whether one graph can feed all unread tokens and draft `levels` tokens."""
        starts, ends = self.runner.lengths[: len(rows)], [len(row.tokens) for row in rows]
        unread = max(end - start for start, end in zip(starts, ends, strict=True))
        if not 0 < unread <= MAX_UNREAD:
            return False
        room = self.runner.cache.room
        return room(starts) >= _width(unread) and room(ends) >= levels

    def draft(self, rows: list[Sequence], levels: int, keys: RowKeys) -> Drafted | None:
        """Feed the unread tokens of all rows, whose states `unread` has, and draft `levels` tokens in each.

        Returns:
            The drafts, valid until the next call; None if this graph can't be captured.
        """
        runner, batch = self.runner, len(rows)
        starts, ends = runner.lengths[:batch], [len(row.tokens) for row in rows]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        width = _width(max(counts))
        if any(known != start for known, start in zip(self._uploaded, starts, strict=False)):
            self._upload(rows)
        fed = [(row.tokens[start:] + [0] * width)[:width] for row, start in zip(rows, starts, strict=True)]
        drafted = self._replay(batch, levels, list(starts), counts, fed, keys)
        if drafted is None:
            return None
        for r, end in enumerate(ends):
            runner.commit(r, end)
            self._uploaded[r], self.unread.counts[r] = end, 0
        return drafted

    def _replay(
        self, batch: int, levels: int, starts: list[int], counts: list[int], fed: list[list[int]], keys: RowKeys
    ) -> Drafted | None:
        """Replay the graph that feeds `counts` tokens of `fed` behind `starts` and drafts `levels` more."""
        runner, width = self.runner, len(fed[0])
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        numbers = [
            starts, *runner.cache_places(batch), counts, keys.host_ids, keys.host_positions, [keys.seed] * batch,
            *map(list, zip(*fed, strict=True)),
        ]  # fmt: skip
        room, columns = runner.cache.room, runner.cache.max_len
        filled = columns - min(room(starts) - width, room(ends) - levels)
        graph = _Graph(
            self.head, self.params, self.role, self.reports, self.size, levels, width,
            captured_extent(runner.backend, filled, columns), runner.cache.prefix is not None,
        )  # fmt: skip
        drafted: Drafted | None = runner.call(
            ("chain", *graph.key),
            numbers,
            min(1 << (batch - 1).bit_length(), runner.cache.max_batch),
            graph.over(runner, self._text, self.unread.states),
            keep=[*self.head.parameters(), *self.head.buffers()],
        )
        if drafted is None:
            return None
        tokens, probs, chances = drafted
        return Drafted(
            tokens[:batch], None if probs is None else probs[:batch], None if chances is None else chances[:batch]
        )

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the first round's graph, for rows that have nothing but one unread token."""
        placed = [0] * rows
        self._replay(
            rows,
            levels,
            placed,
            [1] * rows,
            [[0] * _WIDTHS[0]] * rows,
            RowKeys(0, placed, placed, self.runner.device),
        )

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.unread.move_row(source, target)
        self._text[target].copy_(self._text[source])
        self._uploaded[target] = self._uploaded[source]

    def _upload(self, rows: list[Sequence]) -> None:
        """Copy the whole texts to the device."""
        ends = self.texts.update(rows)
        self._text[: len(rows), : max(ends)].copy_(self.texts.on_device(len(rows), max(ends)))
        self._uploaded[: len(rows)] = self.runner.lengths[: len(rows)]


def _width(unread: int) -> int:
    """Return the captured width that feeds `unread` tokens."""
    return next(width for width in _WIDTHS if width >= unread)


class _Graph(NamedTuple):
    """What a captured chain depends on; `over` makes the function to capture."""

    head: DraftHead
    params: SamplingParams
    role: Role
    reports: bool
    size: int
    levels: int
    width: int
    extent: int
    prefixed: bool

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.head.vocabulary), *self[1:])

    def over(self, runner: GraphRunner, text: Tensor, unread: Tensor) -> Any:
        """Return a function of the numbers [n, R] that feeds and drafts over the runner's cache."""
        # Keep only what outlives the runner.
        model, cache, backend = runner.model, runner.cache, runner.backend

        def forward(x: Tensor, lengths: Tensor, shared: Any) -> tuple[Tensor, Tensor]:
            fed = CapturedBatch(x, lengths, self.extent, True, shared)
            output = model.forward_captured(fed, cache, backend)
            return output.logits, output.require_states()

        def chain(numbers: Tensor) -> Drafted:
            return self._run(numbers, forward, text, unread)

        return chain

    def _run(self, numbers: Tensor, forward: Any, text: Tensor, unread: Tensor) -> Drafted:
        starts, places, rest = (
            numbers[0],
            numbers[1:3] if self.prefixed else None,
            numbers[3 if self.prefixed else 1 :],
        )
        shared = None if places is None else (places[0], places[1])
        counts, ids, positions, seed = rest[:4]
        fed, rows = rest[4:].t().contiguous(), torch.arange(len(starts), device=starts.device)
        text, ends = text[: len(starts)], starts + counts
        # Padding is written too: it lies behind the text's end, and is overwritten before it is read.
        text.scatter_(1, starts[:, None] + torch.arange(self.width, device=starts.device), fed)
        # What lies behind a row's unread states is of earlier rounds.
        is_unread = torch.arange(self.width, device=starts.device) < counts[:, None]
        before = unread[: len(starts), : self.width].where(is_unread[..., None], 0.0)
        x = self.head.inputs(fed, before)
        logits, states = forward(x, starts, shared)
        newest = (counts - 1).clamp(min=0)
        logits, states = logits[rows, newest], states[rows, newest]
        last = last_tokens(text, ends)
        tokens, probs, chances = list[Tensor](), list[Tensor](), list[Tensor]()
        streams = stream(self.role, positions)
        for level in range(self.levels):
            if level:
                x = self.head.inputs(tokens[-1][:, None], states[:, None])
                logits, states = (part[:, -1] for part in forward(x, ends + (level - 1), shared))
                last = append_token(last, tokens[-1])
            logits = add_pointer(self.head, logits, states, text, ends, last)
            if self.params.greedy:
                column = argmax(logits)
                if self.reports:
                    chances.append(logits.float().softmax(-1).gather(1, column[:, None])[:, 0])
            else:
                probs.append(probabilities(logits, self.params))
                column = draw(probs[-1], seed[:1], ids, positions + level, streams, self.head.vocabulary)
            tokens.append(self.head.vocabulary[column])
        if not tokens:
            return Drafted(fed[:, :0], None, None)
        wide = scatter_columns(torch.stack(probs, 1), self.head.vocabulary, self.size) if probs else None
        return Drafted(torch.stack(tokens, 1), wide, torch.stack(chances, 1) if chances else None)
