"""Feeding prompts to a runner's cache, one bounded chunk a call, so that a request to stop never waits long.

Contract: tokens that several prompts begin with are fed once, to the cache's prefix; then each different rest of a
prompt is fed once, and copied to the rows that have the same. A runner that still holds the prefixes of an earlier
prefill does not feed them again. Afterwards each row's valid length is that of its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..sequence import Forward
from .forward import ForwardBatch
from .runner import ModelRunner


class PrefillSteps:
    """The steps of one prefill. fed, total: tokens of all different texts that were fed, and that will be.

    newest: what the last step fed; no rows if it had nothing to feed.
    """

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], return_states: bool = False) -> None:
        self.runner, self.prompts = runner, prompts
        runner.begin()
        self.newest = Forward([], [])
        self.prefixes = [runner.shared.of(prompt) for prompt in prompts]
        first: dict[tuple[int, ...], int] = {}
        self.sources = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
        # Different prompts are computed in the first rows of the cache and copied to their own rows at the end.
        self._places = {row: place for place, row in enumerate(sorted(set(self.sources)))}
        rests = [len(self.prefixes[row]) for row in self._places]
        own = [prompts[row] for row in self._places]
        self._shared: _Feed | None = None
        needed = sorted({prefix for prefix in self.prefixes if prefix})
        if needed and not runner.holds(needed, return_states):
            texts = [list(prefix) for prefix in needed]
            self._shared = _Feed(runner.over_prefix(), texts, [0] * len(texts), return_states)
        self._needed = needed
        self._own = _Feed(runner, own, rests, return_states)
        self.total = self._own.tokens + (0 if self._shared is None else self._shared.tokens)
        if self._shared is None:
            self._attach()
        if self.done:
            self._spread()

    @property
    def fed(self) -> int:
        """Tokens fed so far."""
        return self._own.fed + (0 if self._shared is None else self._shared.fed)

    @property
    def done(self) -> bool:
        return self._own.done and (self._shared is None or self._shared.done)

    def step(self) -> None:
        """Feed the next chunk; after the last, every row holds its prompt and a step does nothing."""
        self.newest = Forward([], [])
        if self.done:
            return
        if self._shared is not None and not self._shared.done:
            self.newest = self._shared.step()
            if self._shared.done:
                self.runner.hold(self._needed, self._shared.last, self._shared.states())
                self._attach()
        elif not self._own.done:
            self.newest = self._own.step()
        if self.done:
            self._spread()

    def _attach(self) -> None:
        """Let the rows in which the rests are fed begin with their prefixes."""
        for row, place in self._places.items():
            self.runner.attach(place, self.prefixes[row])

    def _spread(self) -> None:
        runner = self.runner
        for row in reversed(range(len(self.prompts))):
            place, length = self._places[self.sources[row]], len(self.prompts[row])
            if place != row:
                runner.cache.copy_row(place, row, length)
            runner.commit(row, length)

    def logits(self) -> Tensor:
        """The logits [B, vocab] after each row's last prompt token."""
        found = []
        for source, prefix in zip(self.sources, self.prefixes, strict=True):
            last = self._own.last.get(self._places[source])
            found.append(self.runner.held(prefix)[0] if last is None else last)
        return torch.stack(found)

    def states(self) -> list[Tensor]:
        """The states [len(prompt), hidden] of each row, if the prefill was asked to return them."""
        found = []
        for own, row in zip(self._own.states(), self._places, strict=True):
            prefix = self.prefixes[row]
            shared = self.runner.held(prefix)[1] if prefix else own
            # A rest without tokens has no states, wherever the others are.
            found.append(torch.cat((shared, own)) if prefix and len(own) else shared)
        return [found[self._places[source]] for source in self.sources]


class _Feed:
    """Feeds each text from its start on to its row; `last` holds the logits [vocab] after the ends."""

    def __init__(
        self, runner: ModelRunner, texts: list[list[int]], starts: list[int], return_states: bool
    ) -> None:
        self.runner, self.starts, self.return_states = runner, starts, return_states
        self.rests = [text[start:] for text, start in zip(texts, starts, strict=True)]
        self.width = max(1, runner.prefill_tokens // len(texts))
        self.at, self.longest = 0, max(map(len, self.rests))
        self.last: dict[int, Tensor] = {}
        self._chunks: list[Tensor] = []

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rests))

    @property
    def fed(self) -> int:
        return sum(min(len(rest), self.at) for rest in self.rests)

    @property
    def done(self) -> bool:
        return self.at >= self.longest

    def step(self) -> Forward:
        """Feed the next chunk."""
        start, stop = self.at, min(self.at + self.width, self.longest)
        ends = [len(rest) for rest in self.rests]
        ids = to_device([(rest + [0] * self.longest)[start:stop] for rest in self.rests], self.runner.device)
        take = [min(max(end - 1 - start, 0), stop - start - 1) for end in ends]
        # A text that has ended is fed one token of padding; its last logits are in self.last.
        counts = [max(1, min(end, stop) - start) for end in ends]
        lengths = [begin + start for begin in self.starts]
        output = self.runner.forward(ForwardBatch(ids, lengths, counts, take, self.return_states, eager=True))
        if output.states is not None:
            self._chunks.append(output.states)
        for row, end in enumerate(ends):
            if start < end <= stop:
                self.last[row] = output.logits[row]
        self.at = stop
        return Forward(lengths, counts)

    def states(self) -> list[Tensor]:
        """The states [tokens fed, hidden] of each text; empty if none were asked for."""
        if not self._chunks:
            return [torch.empty(0)] * len(self.rests)
        joined = torch.cat(self._chunks, dim=1)
        return [joined[row, : len(rest)] for row, rest in enumerate(self.rests)]
