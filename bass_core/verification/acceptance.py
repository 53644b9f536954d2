"""What a verification decides, on the device and on the host, and how it marks numbers that are unsound.

Contract: `Outcome` is the result of every rule of verification; `Outcome.host` is the round's one wait for the
device. A row whose logits hold a NaN, or whose token had no probability, is marked UNSOUND and later refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ModelError
from ..machine.transfer import to_host


@dataclass
class Outcome:
    """accepted, next_token int64 [B]; of the drafted tokens p, q, u float32 [B, l] and drafts int64 [B, l].

    next_p float32 [B]: what the target gives next_token. NaN where a number does not exist under the rule.
    """

    accepted: Tensor
    next_token: Tensor
    p: Tensor
    q: Tensor
    u: Tensor
    next_p: Tensor
    drafts: Tensor | None = None

    def host(self) -> tuple[list[int], list[int], list[list[list[float]]], list[float]]:
        """accepted, next tokens, [p, q, u, draft] a row and position, and next_p, in one copy to the host."""
        width = self.p.shape[1]
        drafts = torch.zeros_like(self.p) if self.drafts is None else self.drafts
        # One float32 tensor: counts and token ids are below 2**24, so all of them are exact in it.
        singles = [column[:, None] for column in (self.accepted, self.next_token, self.next_p)]
        rows = to_host(torch.cat((*singles, self.p, self.q, self.u, drafts), dim=1)).tolist()
        parts = [[row[3 + i * width : 3 + (i + 1) * width] for i in range(4)] for row in rows]
        tests = [[list(test) for test in zip(*part, strict=True)] for part in parts]
        return [int(row[0]) for row in rows], [int(row[1]) for row in rows], tests, [row[2] for row in rows]


def probability_at(p: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """p [B, l+1, V] of one token [B] at one position [B] a row: [B]."""
    return p[torch.arange(len(token), device=token.device), position, token]


def accepted_prefix(passed: Tensor) -> Tensor:
    """How many leading entries of each row are true: int64 [B]."""
    return passed.long().cumprod(dim=1).sum(dim=1)


UNSOUND = -1


def mark_unsound(tokens: Tensor, logits: Tensor) -> Tensor:
    """int64 [B]: `tokens`, and UNSOUND where a row's logits [B, V] or [B, l+1, V] hold a NaN or nothing finite."""
    sound = logits.amax(-1).isfinite()
    return tokens.where(sound if sound.dim() == 1 else sound.all(-1), UNSOUND)


def mark_unlikely(tokens: Tensor, chances: Tensor) -> Tensor:
    """int64 [B]: `tokens`, and UNSOUND where a token's probability [B] is NaN or 0, so that it was not drawn."""
    return tokens.where(chances > 0, UNSOUND)


def refuse_unsound(tokens: list[int]) -> None:
    """Raises ModelError where a row was marked: whatever was drawn there means nothing."""
    if UNSOUND in tokens:
        raise ModelError(
            "The model produced NaN or infinite numbers, so its text ends here: use other weights, or load it "
            "with dtype float32."
        )
