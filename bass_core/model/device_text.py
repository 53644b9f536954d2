"""The texts of a runner's rows on its device, where captured graphs read and extend them: `DeviceText`."""

from __future__ import annotations

import torch

from ..machine.transfer import to_device
from ..sequence import Sequence
from .graphs import MAX_CAPTURED_WIDTH, GraphRunner


class DeviceText:
    """The rows' texts, in a buffer that belongs to the runner's cache.

    A graph writes the tokens that it is fed, and its drafts after them. `upload` copies whole texts, but only if
    tokens were written without a graph.

    Args:
        runner: the runner.

    Attributes:
        tokens: int64 [rows, columns].
        known: how many tokens of each row's text the buffer has. Update it after each graph.
    """

    def __init__(self, runner: GraphRunner) -> None:
        cache = runner.cache
        # After the longest text, there is room for a step's padding.
        columns = cache.max_len + (0 if cache.prefix is None else cache.prefix.max_len) + MAX_CAPTURED_WIDTH
        self.tokens = runner.buffer("text", cache.max_batch, columns, dtype=torch.long)
        self.known = [0] * cache.max_batch

    def upload(self, rows: list[Sequence], needed: list[int]) -> None:
        """Copy the texts to the device, unless it has at least needed[r] tokens of each."""
        if all(known >= length for known, length in zip(self.known, needed, strict=False)):
            return
        longest = max(len(row.tokens) for row in rows)
        padded = [row.tokens + [0] * (longest - len(row.tokens)) for row in rows]
        self.tokens[: len(rows), :longest].copy_(to_device(padded, self.tokens.device))
        self.known[: len(rows)] = [len(row.tokens) for row in rows]

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.tokens[target].copy_(self.tokens[source])
        self.known[target] = self.known[source]
