"""The rows' texts as a draft head's pointer searches them (model/pointer.py).

Contract: `update` appends what the rows have written since the last call, on the host; `upload` then puts their
texts on the head's device, where `raised` raises logits by them. After a rewind a row's text is appended anew.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..machine.transfer import to_device
from ..model.draft_head import DraftHead
from ..model.pointer import followers, windows
from ..sample.distribution import compiled
from ..sample.rows import copied
from ..sequence import Sequence


class Texts:
    """The texts of up to `rows` rows. held int64 [rows, T]: on the host; T grows."""

    def __init__(self, head: DraftHead, rows: int) -> None:
        self.head = head
        self.held, self._known = torch.zeros(rows, 0, dtype=torch.long), [0] * rows
        self._text = self._ends = torch.empty(0)

    def upload(self, rows: list[Sequence]) -> Tensor:
        """`update`, for `raised`; returns the rows' last tokens, int64 [B, 1, LONGEST] (`pointer.windows`)."""
        ends = to_device(self.update(rows), self.head.vocabulary.device)
        held = to_device(self.held[: len(rows), : max(self._known[: len(rows)])], ends.device)
        self._text, self._ends = windows(held), ends[:, None]
        return self._text[torch.arange(len(rows), device=ends.device), ends - 1][:, None]

    def update(self, rows: list[Sequence]) -> list[int]:
        """Append what the rows have written; returns how long their texts are."""
        short = max(len(row.tokens) for row in rows) - self.held.shape[1]
        if short > 0:
            self.held = F.pad(self.held, (0, short + self.held.shape[1]))
        for r, row in enumerate(rows):
            self.held[r, self._known[r] : len(row.tokens)] = torch.tensor(row.tokens[self._known[r] :])
            self._known[r] = len(row.tokens)
        return self._known[: len(rows)]

    def raised(self, logits: Tensor, states: Tensor, last: Tensor) -> Tensor:
        """Logits [B, W, V'] as the pointer raises them; states [B, W, hidden]; last int64 [B, W, LONGEST]."""
        found, sizes = followers(self._text, self._ends.expand(last.shape[:2]), last)
        columns, lifts = self.head.column_of(found), self.head.pointer(states, sizes)
        lifts = lifts.masked_fill(columns < 0, 0.0).to(logits.dtype)
        if not compiled(logits):
            return logits.scatter_add(-1, columns.clamp(min=0)[..., None], lifts[..., None])
        raised = copied(logits)
        rows, places = np.indices(columns.shape)
        raised.numpy()[rows, places, columns.clamp(min=0).numpy()] += lifts.numpy()
        return raised

    def rewind(self, row: int, length: int) -> None:
        """Forget what the row wrote from `length` tokens on."""
        self._known[row] = min(self._known[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Row `target` gets the text of row `source`."""
        self.held[target], self._known[target] = self.held[source], self._known[source]


def lengthened(last: Tensor, tokens: Tensor) -> Tensor:
    """The last tokens [B, W, LONGEST] of texts that go on with tokens [B, W]."""
    return torch.cat((tokens[..., None], last[..., :-1]), dim=-1)
