"""The result of a verification, on the device and on the host, and the handling of unsound numbers.

Every verification returns an `Outcome` on the device. `Outcome.host` copies it to the host, row by row; this is a
round's one wait for the device.

A draft whose p or q is not a valid distribution can't be judged: it and all later drafts are rejected without a
test (`judged_drafts`). A row is marked UNSOUND, and refused later, if its token was chosen from logits with a NaN
or had no probability. Unsound logits at positions that the row did not use don't matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..errors import ModelError
from ..machine.transfer import to_host
from ..sample.distribution import compiled, largest


class DraftTest(NamedTuple):
    """The test of one draft. NaN stands for a number that the verification does not use.

    A draft of a chain that could not be judged has p and q NaN, and chance 0.

    Attributes:
        p: the target's probability of `token`.
        q: the draft's probability of `token`.
        u: the uniform number.
        token: the draft.
        chance: the number that u had to be below.
    """

    p: float
    q: float
    u: float
    token: int
    chance: float = math.nan


class RowOutcome(NamedTuple):
    """The result of a verification for one row, on the host.

    Attributes:
        accepted: number of accepted drafts.
        next_token: the token after the accepted drafts: the target's own, or one more draft if `next_drafted`.
        next_p: the target's probability of `next_token`.
        tests: one per column of the round, padding included.
        next_drafted: whether `next_token` is one more accepted draft.
        path: the accepted drafts of a tree; None for a chain, where they are the first `accepted` ones.
        ends: whether `next_token` is written; False under AMUSD if the target has not read the last draft.
    """

    accepted: int
    next_token: int
    next_p: float
    tests: list[DraftTest]
    next_drafted: bool = False
    path: list[int] | None = None
    ends: bool = True

    @property
    def accepted_drafts(self) -> list[int]:
        """Indices of the accepted drafts among the row's drafts."""
        return list(range(self.accepted)) if self.path is None else self.path


@dataclass
class Outcomes(Seq[RowOutcome]):
    """The results of a verification on the host, by column. A row's RowOutcome is made when it is read.

    Attributes:
        accepted, next_tokens, next_p: one entry per row, as in RowOutcome.
        drafts, p, q, u, chance: per row, one entry per draft of the round, padding included, as in DraftTest.
        next_drafted, paths, ends: one entry per row, as in RowOutcome; None for the default in all rows.
    """

    accepted: list[int]
    next_tokens: list[int]
    next_p: list[float]
    drafts: list[list[int]]
    p: list[list[float]]
    q: list[list[float]]
    u: list[list[float]]
    chance: list[list[float]]
    next_drafted: list[bool] | None = None
    paths: list[list[int]] | None = None
    ends: list[bool] | None = None

    @classmethod
    def of(cls, rows: Seq[RowOutcome]) -> Outcomes:
        """Return the outcomes of these rows."""
        columns: Any = ([[test[i] for test in row.tests] for row in rows] for i in range(5))
        p, q, u, drafts, chance = columns
        return cls(
            [row.accepted for row in rows],
            [row.next_token for row in rows],
            [row.next_p for row in rows],
            *(drafts, p, q, u, chance),
            [row.next_drafted for row in rows],
            None if any(row.path is None for row in rows) else [row.accepted_drafts for row in rows],
            [row.ends for row in rows],
        )

    @classmethod
    def plain(cls, tokens: list[int], next_p: list[float]) -> Outcomes:
        """Return the outcomes of a round without drafts."""
        none: list[list[Any]] = [[] for _ in tokens]
        return cls([0] * len(tokens), tokens, next_p, none, none, none, none, none)

    @property
    def final_tokens(self) -> list[int]:
        """Each row's next token, or 0 for a row that does not write it."""
        if self.ends is None:
            return self.next_tokens
        return [token if ends else 0 for token, ends in zip(self.next_tokens, self.ends, strict=True)]

    @property
    def fed_columns(self) -> list[Seq[int]]:
        """The columns of each row's newest token (0) and accepted drafts (i + 1 for draft i)."""
        if self.paths is None:
            return [range(count + 1) for count in self.accepted]
        return [[0, *(draft + 1 for draft in path)] for path in self.paths]

    def of_rows(self, rows: Seq[int]) -> Outcomes:
        """Return the outcomes of these rows, in this order."""
        columns: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        return Outcomes(**{name: part and [part[r] for r in rows] for name, part in columns.items()})

    def path(self, row: int) -> Seq[int]:
        """Return the indices of the accepted drafts among a row's drafts."""
        return range(self.accepted[row]) if self.paths is None else self.paths[row]

    def __len__(self) -> int:
        return len(self.accepted)

    def __getitem__(self, row: Any) -> Any:
        return self._rows[row]

    @cached_property
    def _rows(self) -> list[RowOutcome]:
        columns = zip(self.p, self.q, self.u, self.drafts, self.chance, strict=True)
        rows = zip(self.accepted, self.next_tokens, self.next_p, columns, strict=True)
        return [
            RowOutcome(
                accepted, token, chance, list(map(DraftTest, *tests)),
                self.next_drafted is not None and self.next_drafted[r],
                None if self.paths is None else self.paths[r],
                self.ends is None or self.ends[r],
            )
            for r, (accepted, token, chance, tests) in enumerate(rows)
        ]  # fmt: skip


@dataclass
class Outcome:
    """The result of a verification, on the device.

    Attributes:
        accepted: int64 [B], number of accepted drafts.
        next_token: int64 [B], the token after them.
        p: float32 [B, l], the target's probability of each draft.
        q: float32 [B, l], the draft's probability of each draft.
        u: float32 [B, l], the uniform number of each test; NaN if the verification uses none.
        next_p: float32 [B], the target's probability of next_token; NaN if not known.
        drafts: int64 [B, l], the draft tokens.
        chance: float32 [B, l], the number that u had to be below; None for min(1, p / q).
        judged: int64 [B], number of drafts that could be judged (`judged_drafts`); None for all.
    """

    accepted: Tensor
    next_token: Tensor
    p: Tensor
    q: Tensor
    u: Tensor
    next_p: Tensor
    drafts: Tensor
    chance: Tensor | None = None
    judged: Tensor | None = None

    def host(self) -> Outcomes:
        """Return the outcomes of the rows, in one copy to the host."""
        if is_accelerator(self.p.device):
            return unpack(self.packed())
        return _outcomes(
            *(self.accepted.tolist(), self.next_token.tolist(), self.next_p.tolist()),
            None if self.judged is None else self.judged.tolist(),
            *(self.p.tolist(), self.q.tolist(), self.u.tolist(), self.drafts.tolist()),
            None if self.chance is None else self.chance.tolist(),
        )

    def packed(self) -> Tensor:
        """Return all numbers as one tensor, float32 [B, 4 + 5 l], for `unpack`."""
        # Counts and token ids are below 2**24, so float32 holds them exactly.
        judged = torch.full_like(self.accepted, self.p.shape[1]) if self.judged is None else self.judged
        per_row = [column[:, None] for column in (self.accepted, self.next_token, self.next_p, judged)]
        chance = torch.full_like(self.p, _ALONE) if self.chance is None else self.chance
        return torch.cat((*per_row, self.p, self.q, self.u, self.drafts, chance), dim=1)


# Stands in place of a draft's chance if the draft was judged by itself.
_ALONE = -1.0


def unpack(packed: Tensor, width: int | None = None) -> Outcomes:
    """Copy the outcomes of all rows to the host.

    Args:
        packed: as from Outcome.packed.
        width: how many drafts per row to return; None for all.
    """
    numbers = to_host(packed).double().numpy()
    accepted, next_tokens = numbers[:, :2].T.astype(np.int64).tolist()
    if numbers.shape[1] == 4:
        return Outcomes.plain(next_tokens, numbers[:, 2].tolist())
    p, q, u, drafts, chance = numbers[:, 4:].reshape(len(numbers), 5, -1)[..., :width].transpose(1, 0, 2)
    return _outcomes(
        *(accepted, next_tokens, numbers[:, 2].tolist(), numbers[:, 3].tolist()),
        *(p.tolist(), q.tolist(), u.tolist(), drafts.astype(np.int64).tolist()),
        None if chance[0, 0] == _ALONE else chance.tolist(),
    )


def _outcomes(
    accepted: list[int],
    next_tokens: list[int],
    next_p: list[float],
    judged: list[float] | None,
    p: list[list[float]],
    q: list[list[float]],
    u: list[list[float]],
    drafts: list[list[int]],
    chance: list[list[float]] | None,
) -> Outcomes:
    """Return the outcomes with the numbers of an Outcome; drafts from `judged` on could not be judged."""
    if chance is None:
        chance = [list(map(single_draft_chance, *row)) for row in zip(p, q, u, strict=True)]
    if judged is not None and min(judged) < len(drafts[0]):
        for count, row_p, row_q, row_chance in zip(map(int, judged), p, q, chance, strict=True):
            unknown = [math.nan] * (len(row_p) - count)
            row_p[count:], row_q[count:], row_chance[count:] = unknown, unknown, [0.0] * len(unknown)
    return Outcomes(accepted, next_tokens, next_p, drafts, p, q, u, chance)


def single_draft_chance(p: float, q: float, u: float) -> float:
    """Return the chance min(1, p / q) of a draft that is judged by itself, or NaN if it was not tested with a u.

    If q is 0 (the drafter reports that it could not have drawn its token), u * q < p holds if p is above 0.
    """
    if math.isnan(u):
        return math.nan
    return p / q if p < q else float(p > 0)


def probability_at(p: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Return the probabilities [B], in p [B, l+1, V], of one token [B] at one position [B] per row."""
    return p[torch.arange(len(token), device=token.device), position, token]


def accepted_prefix(passed: Tensor) -> Tensor:
    """Return the number of true entries before each row's first false one: int64 [B]."""
    return passed.long().cumprod(dim=1).sum(dim=1)


# Stands in place of a token id that was chosen from unsound numbers, see the module docstring.
UNSOUND = -1


def sound_columns(logits: Tensor) -> Tensor:
    """Return whether logits [..., V] are free of NaN and +inf and have a finite value: bool [...]."""
    return (largest(logits)[1] if compiled(logits) else logits.amax(-1)).isfinite()


def judged_drafts(sound: Tensor, draft_probs: Tensor | None, num_drafted: Tensor) -> Tensor:
    """Return how many of each row's drafts can be judged: int64 [B].

    Those are the drafts before the first one with unsound logits at its position, or with a NaN or an infinity
    anywhere in the distribution it was drawn from. These logits and this distribution depend only on the text
    before the draft, so leaving the draft out changes no distribution. To check only q of the drawn token would
    bias the output, because that number depends on the draw.

    Args:
        sound: bool [B, l+1], from `sound_columns`.
        draft_probs: float32 [B, l, V], the distributions that the drafts were drawn from, or None.
        num_drafted: int64 [B], number of drafts per row.
    """
    if sound.shape[1] == 1:
        return num_drafted
    fit = sound[:, :-1]
    if draft_probs is not None:
        fit = fit & draft_probs.sum(-1).isfinite()
    return torch.minimum(num_drafted, accepted_prefix(fit))


def mark_unsound(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return `tokens` [B], with UNSOUND for rows whose logits [B, V], which chose the token, are unsound."""
    return tokens.where(sound_columns(logits), UNSOUND)


def mark_unlikely(tokens: Tensor, chances: Tensor) -> Tensor:
    """Return `tokens` [B], with UNSOUND for tokens of probability [B] NaN or 0, which can't be drawn."""
    return tokens.where(chances > 0, UNSOUND)


def refuse_unsound(tokens: list[int]) -> None:
    """Check that no row is marked UNSOUND.

    Raises:
        ModelError: if one is, because its token is meaningless.
    """
    if UNSOUND in tokens:
        raise ModelError(
            "The model produced NaN or infinite numbers, so its text ends here: use other weights, or load it "
            "with dtype float32."
        )
