"""Feed prompts to a runner's cache in chunks of bounded size, so that a request to stop never waits long.

Make `PrefillSteps` and call `step` until it is done. A prefix that several prompts share is fed once, to the
cache's prefix, unless the runner still has it from an earlier prefill. Then each different remainder of a prompt
is fed once, and copied to the other rows with the same prompt. Afterwards each row's valid length is that of its
prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..sequence import Forward
from .forward import ForwardBatch
from .runner import ModelRunner


class PrefillSteps:
    """The steps of one prefill.

    Attributes:
        total: the number of tokens to feed; equal prompts and shared prefixes count once.
        newest: lengths and token counts of the rows that the last step fed; empty if there was nothing to feed.
    """

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], return_states: bool = False) -> None:
        self.runner, self.prompts = runner, prompts
        runner.clear_rows()
        self.newest = Forward([], [])
        self.prefixes = [runner.shared.of(prompt) for prompt in prompts]
        first: dict[tuple[int, ...], int] = {}
        self.sources = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
        # Different prompts are fed in the first rows of the cache and copied to their own rows at the end.
        self._fed_row = {row: place for place, row in enumerate(sorted(set(self.sources)))}
        starts = [len(self.prefixes[row]) for row in self._fed_row]
        prompts_fed = [prompts[row] for row in self._fed_row]
        self._prefix_feed: _Feed | None = None
        needed = sorted({prefix for prefix in self.prefixes if prefix})
        if needed and not runner.has_prefixes(needed, return_states):
            texts = [list(prefix) for prefix in needed]
            self._prefix_feed = _Feed(runner.prefix_runner(), texts, [0] * len(texts), return_states)
        self._prefixes_needed = needed
        self._own_feed = _Feed(runner, prompts_fed, starts, return_states)
        self.total = self._own_feed.tokens + (0 if self._prefix_feed is None else self._prefix_feed.tokens)
        if self._prefix_feed is None:
            self._attach()
        if self.done:
            self._copy_to_rows()

    @property
    def fed(self) -> int:
        """The number of tokens fed so far."""
        return self._own_feed.fed + (0 if self._prefix_feed is None else self._prefix_feed.fed)

    @property
    def done(self) -> bool:
        return self._own_feed.done and (self._prefix_feed is None or self._prefix_feed.done)

    def step(self) -> None:
        """Feed the next chunk. After the last chunk every row holds its prompt, and further calls do nothing."""
        self.newest = Forward([], [])
        if self.done:
            return
        if self._prefix_feed is not None and not self._prefix_feed.done:
            self.newest = self._prefix_feed.step()
            if self._prefix_feed.done:
                self.runner.store_prefixes(
                    self._prefixes_needed, self._prefix_feed.last, self._prefix_feed.states()
                )
                self._attach()
        elif not self._own_feed.done:
            self.newest = self._own_feed.step()
        if self.done:
            self._copy_to_rows()

    def _attach(self) -> None:
        """Attach the rows that are fed to their prefixes."""
        for row, place in self._fed_row.items():
            self.runner.attach(place, self.prefixes[row])

    def _copy_to_rows(self) -> None:
        runner = self.runner
        for row in reversed(range(len(self.prompts))):
            place, length = self._fed_row[self.sources[row]], len(self.prompts[row])
            if place != row:
                runner.cache.copy_row(place, row, length)
            runner.commit(row, length)

    def logits(self) -> Tensor:
        """Return the logits [B, vocab] after each row's last prompt token."""
        logits = []
        for source, prefix in zip(self.sources, self.prefixes, strict=True):
            last = self._own_feed.last.get(self._fed_row[source])
            logits.append(self.runner.prefix_output(prefix)[0] if last is None else last)
        return torch.stack(logits)

    def states(self) -> list[Tensor]:
        """Return each row's states [len(prompt), hidden], if the prefill was asked for states."""
        states = []
        for own_states, row in zip(self._own_feed.states(), self._fed_row, strict=True):
            prefix = self.prefixes[row]
            prefix_states = self.runner.prefix_output(prefix)[1] if prefix else own_states
            # An empty remainder has no states; its placeholder may be on another device.
            states.append(torch.cat((prefix_states, own_states)) if prefix and len(own_states) else prefix_states)
        return [states[self._fed_row[source]] for source in self.sources]


class _Feed:
    """Feed texts to rows, each from its start on; `last` has the logits [vocab] after each text, by row."""

    def __init__(
        self, runner: ModelRunner, texts: list[list[int]], starts: list[int], return_states: bool
    ) -> None:
        self.runner, self.starts, self.return_states = runner, starts, return_states
        self.remainders = [text[start:] for text, start in zip(texts, starts, strict=True)]
        self.width = max(1, runner.prefill_tokens // len(texts))
        self.position, self.longest = 0, max(map(len, self.remainders))
        self.last: dict[int, Tensor] = {}
        self._chunks: list[Tensor] = []

    @property
    def tokens(self) -> int:
        return sum(map(len, self.remainders))

    @property
    def fed(self) -> int:
        return sum(min(len(remainder), self.position) for remainder in self.remainders)

    @property
    def done(self) -> bool:
        return self.position >= self.longest

    def step(self) -> Forward:
        start, stop = self.position, min(self.position + self.width, self.longest)
        ends = [len(remainder) for remainder in self.remainders]
        ids = to_device(
            [(remainder + [0] * self.longest)[start:stop] for remainder in self.remainders], self.runner.device
        )
        take = [min(max(end - 1 - start, 0), stop - start - 1) for end in ends]
        # A finished text is fed one padding token; its logits are in self.last already.
        counts = [max(1, min(end, stop) - start) for end in ends]
        lengths = [first + min(start, end) for first, end in zip(self.starts, ends, strict=True)]
        output = self.runner.forward(ForwardBatch(ids, lengths, counts, take, self.return_states, eager=True))
        if output.states is not None:
            self._chunks.append(output.states)
        for row, end in enumerate(ends):
            if start < end <= stop:
                self.last[row] = output.logits[row]
            self.runner.commit(row, self.starts[row] + min(end, stop))
        if self.runner.cache.states is not None:
            self.runner.cache.states.drop_inputs()
        self.position = stop
        return Forward(lengths, counts)

    def states(self) -> list[Tensor]:
        """Return the states [tokens fed, hidden] of each text; empty if none were wanted."""
        if not self._chunks:
            return [torch.empty(0)] * len(self.remainders)
        joined = torch.cat(self._chunks, dim=1)
        return [joined[row, : len(remainder)] for row, remainder in enumerate(self.remainders)]
