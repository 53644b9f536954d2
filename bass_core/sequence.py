"""One sequence of a batch while it is being written, and the plain record of a round.

Contract: a Sequence knows its prompt, what it wrote, where each token came from and when, and why it ended.
Non-goals: tensors, models, clocks; times are handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Sequence:
    """`id` is the key of its noise, `index` its place in the request. Token ids are the new ones alone."""

    index: int
    id: int
    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prefilled_ms: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens it may still write."""
        return self.max_new_tokens - len(self.token_ids)

    def write(self, tokens: list[int], origins: list[str]) -> int:
        """Append tokens until one ends the sequence; how many were taken."""
        for count, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            self.token_ids.append(token)
            self.tokens.append(token)
            self.origins.append(origin)
            if token in self.eos:
                self.finish_reason = "eos"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)


@dataclass
class RowRound:
    """What one round did to one sequence.

    `drafted`, `p`, `q`, `u`: the drafted tokens and their test; `accepted`: how many of them stand; `tokens`
    and `origins`: what was written. Drafts behind an accepted end-of-text token are left out everywhere.
    A row that a common stop cut short ends with one more accepted draft in place of the target's own token, which
    `accepted` does not count. `next_p` is p of the token behind the accepted ones. NaN stands for a number that
    does not exist there (u under coupled verification, next_p of a prefill).
    """

    sequence: int
    drafted: list[int]
    p: list[float]
    q: list[float]
    u: list[float]
    accepted: int
    tokens: list[int]
    origins: list[str]
    finish_reason: str | None
    next_p: float = math.nan


@dataclass
class Round:
    """One step of a decoder: kind "prefill" (a chunk, or the one that wrote first tokens), "plain" or "verify".

    `draft_length` is the length the policy asked for, `draft_forwards` how many forwards of a draft model the
    drafts took, `draft_tokens` how many tokens it drew (copies are none; drafts that nobody looked at count),
    `time_ms` the lane time at its end.
    """

    kind: str
    draft_length: int = 0
    rows: list[RowRound] = field(default_factory=list)
    time_ms: float = 0.0
    draft_forwards: int = 0
    draft_tokens: int = 0
