"""What a verification decides, on the device and on the host, and how it marks numbers that are unsound.

Contract: `Outcome` is the result of every verification, on the device; `Outcome.host`, the round's one wait for
the device, gives it row by row. A draft whose p or q is no distribution can't be judged: it and all drafts after
it are refused without a test (`judged_drafts`). A row whose token was chosen by logits that hold a NaN, or had no
probability, is marked UNSOUND and later refused; logits that no choice of the row used count for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError
from ..machine.transfer import to_host
from ..sample.distribution import compiled, largest


class DraftTest(NamedTuple):
    """How a draft was tested: the target's and the draft's probability of `token`, and the uniform u.

    chance: what u had to be below. NaN where a verification knows no such number. A draft of a chain that could
    not be judged has p and q NaN, and chance 0.
    """

    p: float
    q: float
    u: float
    token: int
    chance: float = math.nan


class RowOutcome(NamedTuple):
    """What a verification decided of a row, on the host.

    `tests`: of all columns of the round, padding included. `next_token` follows the accepted drafts, the target
    gives it probability `next_p`; it is the target's own token, or one more accepted draft if `next_drafted`.
    `path`: the accepted drafts of a tree; None: the first `accepted` ones.
    """

    accepted: int
    next_token: int
    next_p: float
    tests: list[DraftTest]
    next_drafted: bool = False
    path: list[int] | None = None

    @property
    def accepted_drafts(self) -> list[int]:
        """The accepted drafts, by their place among the row's drafts."""
        return list(range(self.accepted)) if self.path is None else self.path


@dataclass
class Outcome:
    """accepted, next_token int64 [B]; of the drafted tokens p, q, u float32 [B, l] and drafts int64 [B, l].

    next_p float32 [B]: what the target gives next_token. NaN where a verification knows no such number.
    chance float32 [B, l]: what u had to be below; None: min(1, p / q). judged int64 [B]: how many drafts of a row
    could be judged (`judged_drafts`); None: all.
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
        """The rows' outcomes, in one copy to the host."""
        width = self.p.shape[1]
        # One float32 tensor: counts and token ids are below 2**24, so all of them are exact in it.
        judged = torch.full_like(self.accepted, width) if self.judged is None else self.judged
        singles = [column[:, None] for column in (self.accepted, self.next_token, self.next_p, judged)]
        each = [self.p, self.q, self.u, self.drafts, *([] if self.chance is None else [self.chance])]
        rows = to_host(torch.cat((*singles, *each), dim=1)).tolist()
        outcomes = []
        for accepted, next_token, next_p, last, *numbers in rows:
            p, q, u, drafts, *chance = (numbers[i * width : (i + 1) * width] for i in range(len(each)))
            below = chance[0] if chance else map(chance_alone, p, q, u)
            tests = list(map(DraftTest, p, q, u, map(int, drafts), below))
            for i in range(int(last), width):
                tests[i] = tests[i]._replace(p=math.nan, q=math.nan, chance=0.0)
            outcomes.append(RowOutcome(int(accepted), int(next_token), next_p, tests))
        return outcomes


def chance_alone(p: float, q: float, u: float) -> float:
    """The chance min(1, p / q) of a draft that is judged alone; NaN where no u decides.

    Where q is 0, of a drafter that says it could not have drawn its token, u * q < p means that p is above 0.
    """
    if math.isnan(u):
        return math.nan
    return p / q if p < q else float(p > 0)


def probability_at(p: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """p [B, l+1, V] of one token [B] at one position [B] a row: [B]."""
    return p[torch.arange(len(token), device=token.device), position, token]


def accepted_prefix(passed: Tensor) -> Tensor:
    """How many leading entries of each row are true: int64 [B]."""
    return passed.long().cumprod(dim=1).sum(dim=1)


# Stands in the place of a token id.
UNSOUND = -1


def sound_columns(logits: Tensor) -> Tensor:
    """bool [...]: whether logits [..., V] hold no NaN, no positive infinity, and something finite."""
    return (largest(logits)[1] if compiled(logits) else logits.amax(-1)).isfinite()


def judged_drafts(sound: Tensor, draft_probs: Tensor | None, num_drafted: Tensor) -> Tensor:
    """How many of each row's first num_drafted int64 [B] drafts can be judged: int64 [B].

    Those before the first with unsound logits at its place, sound bool [B, l+1], or with a NaN or an infinity
    anywhere in what it was drawn from, draft_probs [B, l, V]. Both are decided by the text before that draft, so
    that leaving it out changes no distribution. Its own q alone would not do: the token drawn there decides it.
    """
    if sound.shape[1] == 1:
        return num_drafted
    fit = sound[:, :-1]
    if draft_probs is not None:
        fit = fit & draft_probs.sum(-1).isfinite()
    return torch.minimum(num_drafted, accepted_prefix(fit))


def mark_unsound(tokens: Tensor, logits: Tensor) -> Tensor:
    """int64 [B]: `tokens`, but UNSOUND where the logits [B, V] that they were chosen by are unsound."""
    return tokens.where(sound_columns(logits), UNSOUND)


def mark_unlikely(tokens: Tensor, chances: Tensor) -> Tensor:
    """int64 [B]: `tokens`, but UNSOUND where a token's probability [B] is NaN or 0, so that it was not drawn."""
    return tokens.where(chances > 0, UNSOUND)


def refuse_unsound(tokens: list[int]) -> None:
    """Raises ModelError if a row was marked UNSOUND: what was drawn for it means nothing."""
    if UNSOUND in tokens:
        raise ModelError(
            "The model produced NaN or infinite numbers, so its text ends here: use other weights, or load it "
            "with dtype float32."
        )
