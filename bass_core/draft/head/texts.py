"""The rows' texts, in which a draft head's pointer searches (model/pointer.py).

Call `update` to append the tokens written since the last call, or `upload` to also copy the texts to the head's
device, where `with_pointer` reads them.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.support import CompileFailed, available, on

from ...machine.transfer import to_device
from ...model.draft_head import DraftHead
from ...model.pointer import LONGEST, SHORTEST, followers, windows
from ...sample.distribution import compiled
from ...sample.rows import copied
from ...sequence import Sequence


class Texts:
    """The texts of up to `rows` rows: token_ids int64 [rows, T] on the host, where T grows."""

    def __init__(self, head: DraftHead, rows: int) -> None:
        self.head = head
        self.token_ids, self._known = torch.zeros(rows, 0, dtype=torch.long), [0] * rows
        self._text = self._ends = torch.empty(0)

    def upload(self, rows: list[Sequence]) -> Tensor:
        """Do `update`, then copy the texts to the device.

        Returns:
            The last tokens of each row, int64 [B, 1, LONGEST] (`pointer.windows`).
        """
        ends = to_device(self.update(rows), self.head.vocabulary.device)
        uploaded = to_device(self.token_ids[: len(rows), : max(self._known[: len(rows)])], ends.device)
        self._text, self._ends = windows(uploaded), ends[:, None]
        return self._text[torch.arange(len(rows), device=ends.device), ends - 1][:, None]

    def update(self, rows: list[Sequence]) -> list[int]:
        """Append the new tokens of the rows and return the lengths of their texts."""
        missing = max(len(row.tokens) for row in rows) - self.token_ids.shape[1]
        if missing > 0:
            self.token_ids = F.pad(self.token_ids, (0, missing + self.token_ids.shape[1]))
        token_ids = self.token_ids.numpy()
        for r, row in enumerate(rows):
            token_ids[r, self._known[r] : len(row.tokens)] = row.tokens[self._known[r] :]
            self._known[r] = len(row.tokens)
        return self._known[: len(rows)]

    def with_pointer(self, logits: Tensor, states: Tensor, last: Tensor) -> Tensor:
        """Return logits [B, W, V'] with the pointer's additions.

        Args:
            logits: [B, W, V'].
            states: the head's states [B, W, hidden].
            last: int64 [B, W, LONGEST], the last tokens before each position.
        """
        return _with_increases(self.head, logits, states, self._text, self._ends, last)

    def rewind(self, row: int, length: int) -> None:
        """Forget the tokens of a row from `length` on."""
        self._known[row] = min(self._known[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Give row `target` the text of row `source`."""
        self.token_ids[target], self._known[target] = self.token_ids[source], self._known[source]


def last_tokens(text: Tensor, ends: Tensor) -> Tensor:
    """Return the last LONGEST tokens of int64 [R, T], of which ends[r] are a row's: newest first, [R, LONGEST].

    Before a text begins they are -1.
    """
    at = ends[:, None] - 1 - torch.arange(LONGEST, device=text.device)
    return text.gather(1, at.clamp(min=0)).where(at >= 0, -1)


def add_pointer(
    head: DraftHead, logits: Tensor, states: Tensor, text: Tensor, ends: Tensor, last: Tensor
) -> Tensor:
    """Return logits [R, W, V'] with the additions of the head's pointer, if it has one, as `with_pointer` does.

    Nothing is read on the host.

    Args:
        states: the head's states [R, W, hidden].
        text: int64 [R, T], of which the first ends[r] tokens are searched.
        ends: int64 [R].
        last: int64 [R, W, LONGEST], from `last_tokens`, or `append_token` after drafts.
    """
    if head.pointer is None:
        return logits
    if available(logits.device):
        from kernels.triton import pointer as kernel  # imports triton

        with suppress(CompileFailed), on(logits.device):
            raised, pointer = logits.contiguous(), head.pointer
            flat, states, last = (values.flatten(0, 1) for values in (raised, states, last))
            kernel.add(flat, states, last, text, ends, head.columns, pointer.weight, pointer.by_size, SHORTEST)
            return raised
    return _with_increases(head, logits, states, windows(text), ends[:, None], last)


def _with_increases(
    head: DraftHead, logits: Tensor, states: Tensor, text: Tensor, ends: Tensor, last: Tensor
) -> Tensor:
    """Do the work of `with_pointer`, given the windows [B, T, LONGEST] of the texts and their lengths [B, 1]."""
    next_ids, sizes = followers(text, ends.expand(last.shape[:2]), last)
    columns, lifts = head.column_of(next_ids), head.pointer(states, sizes)
    lifts = lifts.masked_fill(columns < 0, 0.0).to(logits.dtype)
    if not compiled(logits):
        return logits.scatter_add(-1, columns.clamp(min=0)[..., None], lifts[..., None])
    output = copied(logits)
    rows, places = np.indices(columns.shape)
    output.numpy()[rows, places, columns.clamp(min=0).numpy()] += lifts.numpy()
    return output


class NoTexts(Texts):
    """Takes the place of Texts for a head without a pointer, whose logits stay as they are."""

    def update(self, rows: list[Sequence]) -> list[int]:
        return [0] * len(rows)

    def upload(self, rows: list[Sequence]) -> Tensor:
        return torch.zeros(len(rows), 1, 1, dtype=torch.long, device=self.head.vocabulary.device)

    def with_pointer(self, logits: Tensor, states: Tensor, last: Tensor) -> Tensor:
        return logits


def append_token(last: Tensor, tokens: Tensor) -> Tensor:
    """Append one token of `tokens` [B, W] to each window in `last` [B, W, LONGEST], and drop its oldest token."""
    return torch.cat((tokens[..., None], last[..., :-1]), dim=-1)
