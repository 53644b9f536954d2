"""Chains of drafts in one CUDA graph, from the tokens that a model has not read yet to its last draft.

`ChainGraphs.replay` feeds every row's unread tokens and drafts the same number of tokens in each. A round sends
one packed tensor of numbers to the device and reads nothing. A `ChainModel` computes the logits inside the graph:
a draft head (head_graph.py) or a draft model (model_graph.py). Rows that draft nothing are fed too, which costs
no more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.backends import captured_extent

from ..machine.transfer import to_host
from ..model.forward import CapturedBatch, ForwardOutput
from ..model.graphs import GraphRunner
from ..sample.distribution import argmax, probabilities
from ..sample.draw import draw
from ..sample.noise import Role, RowKeys, stream
from ..sample.params import SamplingParams
from .base import Proposal

# The most tokens of a row that one graph feeds, and the widths that are captured: a round's unread tokens are fed
# in the narrowest that holds them.
MAX_UNREAD = 17
WIDTHS = (2, 5, 9, MAX_UNREAD)


class Drafted(NamedTuple):
    """The drafts of a graph.

    Attributes:
        tokens: int64 [B, l].
        probs: float32 [B, l, V], the distributions that they were drawn from; None for greedy drafts.
        chances: float32 [B, l], each greedy draft's probability at temperature 1, if wanted.
    """

    tokens: Tensor
    probs: Tensor | None
    chances: Tensor | None

    def proposal(self, counts: list[int]) -> Proposal:
        """Return the first counts[r] drafts of each row."""
        own = None if self.chances is None else partial(_listed, self.chances, counts)
        return Proposal(self.tokens, list(counts), self.probs, own=own)


def _listed(chances: Tensor, counts: list[int]) -> list[list[float | None]]:
    """Return the probabilities [B, l] of each row's counts[r] drafts; waits for the device."""
    return [list(row[:count]) for row, count in zip(to_host(chances).tolist(), counts, strict=True)]


class Unread(NamedTuple):
    """A graph's input, for R rows.

    Attributes:
        tokens: int64 [R, W], each row's unread tokens, then padding.
        starts: int64 [R], the position of each row's first one.
        counts: int64 [R], how many they are.
        prompts: int64 [R], the length of each row's prompt.
        forward: feeds ids [R, S] or embeddings [R, S, hidden] at positions int64 [R].
    """

    tokens: Tensor
    starts: Tensor
    counts: Tensor
    prompts: Tensor
    forward: Callable[[Tensor, Tensor], ForwardOutput]

    @property
    def ends(self) -> Tensor:
        """The positions of the first drafts: int64 [R]."""
        return self.starts + self.counts

    def write(self, text: Tensor) -> None:
        """Write the unread tokens to texts [R, T]. Padding lies after a text's end, and nothing reads it."""
        text.scatter_(
            1, self.starts[:, None] + torch.arange(self.tokens.shape[1], device=text.device), self.tokens
        )

    def newest(self, values: Tensor) -> Tensor:
        """Return the values [R, ...] of each row's last unread token, of values [R, W, ...]."""
        rows = torch.arange(len(self.counts), device=values.device)
        return values[rows, (self.counts - 1).clamp(min=0)]


class ChainModel(Protocol):
    """The model of a captured chain. It must not refer to a runner, which its graphs outlive."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V'], the token id of each column of its logits. None: all of the target's ids, in order."""
        ...

    @property
    def reads_states(self) -> bool:
        """Whether its forwards have to return hidden states."""
        ...

    @property
    def key(self) -> tuple[Any, ...]:
        """What its graphs depend on. Models with equal keys share graphs."""
        ...

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that its graphs have to keep alive."""
        ...

    def logits(self, unread: Unread) -> Generator[Tensor, Tensor, None]:
        """Yield the logits [R, V'] after the unread tokens, and after each draft int64 [R] that is sent."""
        ...


def captured_width(unread: int) -> int:
    """Return the captured width that feeds `unread` tokens."""
    return next(width for width in WIDTHS if width >= unread)


class ChainGraphs:
    """Drafts chains in graphs that belong to the cache of `runner`.

    Args:
        runner: runs the model.
        model: computes the logits.
        size: V, the size of the target's vocabulary.
        params: how drafts are sampled.
        role: their noise.
        reports: whether greedy drafts come with their probabilities.
    """

    def __init__(
        self,
        runner: GraphRunner,
        model: ChainModel,
        size: int,
        params: SamplingParams,
        role: Role,
        reports: bool,
    ) -> None:
        self.runner, self.model, self.size = runner, model, size
        self.params, self.role, self.reports = params, role, reports and params.greedy

    def fits(self, starts: list[int], counts: list[int], levels: int) -> bool:
        """Return whether one graph can feed counts[r] tokens after starts[r] and draft `levels` more."""
        unread, room = max(counts), self.runner.cache.room
        if not 0 < unread <= MAX_UNREAD:
            return False
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        return room(starts) >= captured_width(unread) and room(ends) >= levels

    def replay(
        self,
        levels: int,
        starts: list[int],
        unread: list[list[int]],
        prompts: list[int],
        keys: RowKeys,
    ) -> Drafted | None:
        """Feed unread[r] after the first starts[r] tokens of row r and draft `levels` tokens in each row.

        Returns:
            The drafts, valid until the next call; None if this graph can't be captured.
        """
        runner, batch, counts = self.runner, len(starts), list(map(len, unread))
        width, ends = captured_width(max(counts)), [a + b for a, b in zip(starts, counts, strict=True)]
        padded = [tokens + [0] * (width - len(tokens)) for tokens in unread]
        numbers = [
            starts, *runner.cache_places(batch), counts, prompts, keys.host_ids, keys.host_positions,
            [keys.seed] * batch, *map(list, zip(*padded, strict=True)),
        ]  # fmt: skip
        room, columns = runner.cache.room, runner.cache.max_len
        filled = columns - min(room(starts) - width, room(ends) - levels)
        rows = min(1 << (batch - 1).bit_length(), runner.cache.max_batch)
        prefixed = runner.cache.prefix is not None
        extent = captured_extent(runner.backend, filled, columns)
        drawn = not self.params.greedy and levels > 0
        probs = runner.draft_probs(rows, levels, self.size) if drawn else None
        graph = _Graph(
            self.model, self.params, self.role, self.reports, self.size, levels, extent, prefixed, runner.vocab
        )
        output: tuple[Tensor, Tensor | None] | None = runner.call(
            ("chain", self.model.key, width, *graph[1:]),
            numbers,
            rows,
            graph.over(runner, probs),
            keep=self.model.tensors,
            shared=("probs",) if drawn else (),
        )
        if output is None:
            return None
        tokens, chances = output
        return Drafted(
            tokens[:batch], None if probs is None else probs[:batch], None if chances is None else chances[:batch]
        )

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the first round's graph, for rows that have nothing but one unread token."""
        zeros = [0] * rows
        self.replay(levels, zeros, [[0]] * rows, zeros, RowKeys(0, zeros, zeros, self.runner.device))


class _Graph(NamedTuple):
    """What a captured chain depends on; `over` makes the function to capture."""

    model: ChainModel
    params: SamplingParams
    role: Role
    reports: bool
    size: int
    levels: int
    extent: int
    prefixed: bool
    vocab: int

    def over(self, runner: GraphRunner, probs: Tensor | None) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
        """Return a function of the numbers [n, R] that feeds and drafts over the runner's cache.

        It returns the drafts and their chances, as in Drafted, and writes the distributions to `probs`.
        """
        # Keep only what outlives the runner.
        model, cache, backend = runner.model, runner.cache, runner.backend

        def chain(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            shared = (numbers[1], numbers[2]) if self.prefixed else None
            counts, prompts, *noise = numbers[3 if self.prefixed else 1 :][:5]
            fed = numbers[8 if self.prefixed else 6 :].t().contiguous()

            def forward(x: Tensor, lengths: Tensor) -> ForwardOutput:
                batch = CapturedBatch(x, lengths, self.extent, self.model.reads_states, shared)
                output = model.forward_captured(batch, cache, backend)
                output.logits = output.logits[..., : self.vocab]
                return output

            return self._draw(Unread(fed, numbers[0], counts, prompts, forward), noise, probs)

        return chain

    def _draw(self, unread: Unread, noise: list[Tensor], probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ids, positions, seed = noise
        streams, vocabulary = stream(self.role, positions), self.model.vocabulary
        tokens, chances = list[Tensor](), list[Tensor]()
        if probs is not None and vocabulary is not None:
            probs.zero_()
        steps = self.model.logits(unread)
        logits = next(steps)
        for level in range(self.levels):
            if level:
                logits = steps.send(tokens[-1])
            if probs is None:
                column = argmax(logits)
                if self.reports:
                    chances.append(logits.float().softmax(-1).gather(1, column[:, None])[:, 0])
            else:
                q = probabilities(logits, self.params)
                column = draw(q, seed[:1], ids, positions + level, streams, vocabulary)
                if vocabulary is None:
                    probs[:, level].copy_(q)
                else:
                    probs[:, level].index_copy_(-1, vocabulary, q)
            tokens.append(column if vocabulary is None else vocabulary[column])
        drafts = torch.stack(tokens, 1) if tokens else unread.tokens[:, :0]
        return drafts, torch.stack(chances, 1) if chances else None
