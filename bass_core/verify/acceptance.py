"""The result of a verification, on the device and on the host, and the handling of unsound numbers.

Every verification returns an `Outcome` on the device. `Outcome.host` copies it to the host, row by row; this is a
round's one wait for the device.

A draft whose p or q is not a valid distribution can't be judged: it and all later drafts are rejected without a
test (`judged_drafts`). A row is marked UNSOUND, and refused later, if its token was chosen from logits with a NaN
or had no probability. Unsound logits at positions that the row did not use don't matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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

    def host(self) -> list[RowOutcome]:
        """Return the outcome of each row, in one copy to the host."""
        if is_accelerator(self.p.device):
            return unpack(self.packed())
        rows, width = self.p.shape
        judged = [width] * rows if self.judged is None else self.judged.tolist()
        chances = [None] * rows if self.chance is None else self.chance.tolist()
        numbers = (self.accepted, self.next_token, self.next_p, self.p, self.q, self.u, self.drafts)
        return list(map(_row_outcome, judged, chances, *[number.tolist() for number in numbers]))

    def packed(self) -> Tensor:
        """Return all numbers as one tensor, float32 [B, 4 + 5 l], for `unpack`."""
        # Counts and token ids are below 2**24, so float32 holds them exactly.
        judged = torch.full_like(self.accepted, self.p.shape[1]) if self.judged is None else self.judged
        per_row = [column[:, None] for column in (self.accepted, self.next_token, self.next_p, judged)]
        chance = torch.full_like(self.p, _ALONE) if self.chance is None else self.chance
        return torch.cat((*per_row, self.p, self.q, self.u, self.drafts, chance), dim=1)


# Stands in place of a draft's chance if the draft was judged by itself.
_ALONE = -1.0


def unpack(packed: Tensor) -> list[RowOutcome]:
    """Copy the outcomes of all rows to the host: `packed` as from Outcome.packed."""
    width, outcomes = (packed.shape[1] - 4) // 5, []
    for accepted, next_token, next_p, num_judged, *numbers in to_host(packed).tolist():
        if not width:
            outcomes.append(RowOutcome(int(accepted), int(next_token), next_p, []))
            continue
        p, q, u, drafts, chances = [numbers[i : i + width] for i in range(0, 5 * width, width)]
        own_chances = None if chances[0] == _ALONE else chances
        drafts = list(map(int, drafts))
        outcomes.append(
            _row_outcome(int(num_judged), own_chances, int(accepted), int(next_token), next_p, p, q, u, drafts)
        )
    return outcomes


def _row_outcome(
    judged: int,
    chances: list[float] | None,
    accepted: int,
    next_token: int,
    next_p: float,
    p: list[float],
    q: list[float],
    u: list[float],
    drafts: list[int],
) -> RowOutcome:
    """Return a row's outcome from its numbers in an Outcome; drafts from `judged` on could not be judged."""
    if chances is None:
        chances = list(map(single_draft_chance, p, q, u))
    tests = list(map(DraftTest, p[:judged], q, u, drafts, chances))
    for number, token in zip(u[judged:], drafts[judged:], strict=True):
        tests.append(DraftTest(math.nan, math.nan, number, token, 0.0))
    return RowOutcome(accepted, next_token, next_p, tests)


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
