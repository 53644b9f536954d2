"""The texts of a runner's rows on its device, where captured graphs read and extend them: `DeviceText`."""

from __future__ import annotations

from torch import Tensor

from ..machine.transfer import to_device
from ..sequence import Sequence


class DeviceText:
    """The rows' texts, in a buffer that belongs to the runner's cache.

    A graph writes the tokens that it is fed, and its drafts after them. `upload` copies whole texts, but only if
    tokens were written without a graph. Make it with `ModelRunner.device_text`.

    Attributes:
        tokens: int64 [rows, columns].
        num_valid: how many tokens of each row's text the buffer has. Update it after each graph.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.num_valid = tokens, [0] * len(tokens)

    def upload(self, rows: list[Sequence], needed: list[int]) -> None:
        """Copy the texts to the device, unless it has at least needed[r] tokens of each."""
        if all(valid >= length for valid, length in zip(self.num_valid, needed, strict=False)):
            return
        longest = max(len(row.tokens) for row in rows)
        padded = [row.tokens + [0] * (longest - len(row.tokens)) for row in rows]
        self.tokens[: len(rows), :longest].copy_(to_device(padded, self.tokens.device))
        self.num_valid[: len(rows)] = [len(row.tokens) for row in rows]

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.tokens[target].copy_(self.tokens[source])
        self.num_valid[target] = self.num_valid[source]
