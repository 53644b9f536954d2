"""One sequence of a batch while it is being generated, and the record of a round.

Contract: a Sequence knows its prompt, its new tokens, where each of them came from and when, and why it ended.
What happened in a round has one shape: Round and RowRound. Their `record` is the JSON that snapshots, recordings,
exports and the page's script read, under the names of the fields; a field that is marked INNER is left out.
Non-goals: tensors, models, clocks; the caller passes the times in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

# A dataclass as plain data: its fields by their names.
Record = dict[str, Any]
# Marks a field that a record leaves out: `field(metadata=INNER)`.
INNER = {"inner": True}
# Decimals of the parts of a round's time, of which two or three are shown.
DECIMALS = 4


def record_of(value: Any) -> Any:
    """The value as plain data that never changes afterwards: dataclasses as dictionaries, NaN as None."""
    if is_dataclass(value):
        kind: Any = type(value)
        return {name: record_of(getattr(value, name)) for name in _recorded(kind)}
    if isinstance(value, list):
        if value and is_dataclass(value[0]):
            return [record_of(one) for one in value]
        # NaN alone is not itself.
        return [one if one == one else None for one in value]
    return value if value == value else None


@cache
def _recorded(kind: Any) -> list[str]:
    """The names of a dataclass's fields that are recorded."""
    return [one.name for one in fields(kind) if not one.metadata]


@dataclass
class Sequence:
    """`id` keys its sampling noise; `index` is its place in the request; `token_ids` holds the new tokens only.

    stopped: asked of each new token in turn, whether the text that ends with it holds a stop string; None: there
    are none.
    """

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
    stopped: Callable[[int], bool] | None = None
    # Of each new token where they are asked for (decode/logprobs.py), else empty.
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still generate."""
        return self.max_new_tokens - len(self.token_ids)

    def write(self, tokens: list[int], origins: list[str]) -> int:
        """Append tokens until one ends the sequence; return how many were appended."""
        for count, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            self.token_ids.append(token)
            self.tokens.append(token)
            self.origins.append(origin)
            if token in self.eos:
                self.finish_reason = "eos"
            elif self.stopped is not None and self.stopped(token):
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)


def depths_of(parents: list[int]) -> list[int]:
    """The depth of each draft of a tree, 1 next to the newest token; parents: see RowRound."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


@dataclass
class Candidate:
    """A token at one place of a text: the target's p of it, the draft's q, and its share of the residual.

    None marks a number that the rule does not use there. text: the token's, filled in by a lane with a tokenizer.
    """

    token: int
    p: float
    q: float | None
    residual: float | None
    text: str | None = None


@dataclass(frozen=True)
class Ending:
    """Where a round left a row: after `after` accepted drafts, where the target added a token of its own.

    draft: the rejected draft that the token replaces, by its index; None where none was drawn or tested there.
    mass: the sum over all tokens of the residual before it is normalised, max(0, reach * p - q); None where the
    token does not come from a residual. reach: see verify/block.py; 1 under the other rules. top: the eight
    likeliest tokens there, then the rejected draft and the added token where they are not among them.
    """

    after: int
    draft: int | None
    mass: float | None
    reach: float
    top: list[Candidate]


@dataclass(frozen=True)
class RowDetail:
    """More of a row's round, for a reader who goes through it step by step.

    rule: what decided: "rejection", "block", "tree", "coupled", "greedy", or "coin" (`synthetic_acceptance`).
    sources: of each draft who proposed it: "head", "model", "copy", "window" or "drafter". own_p, own_q:
    greedy only, the probabilities that the target and the draft give each draft at temperature 1; None where they
    are not known. ending: None if the round ended with an accepted draft.
    """

    rule: str
    sources: list[str]
    own_p: list[float | None] | None
    own_q: list[float | None] | None
    ending: Ending | None


@dataclass
class RowRound:
    """What one round did to one sequence: it appended `tokens`, from index `start` of the new tokens on.

    `drafted`, `p`, `q`, `u`, `chance`: the drafted tokens and, for each, the target's probability, the draft's,
    the uniform number of its test and what that had to be below. `accepted`: how many drafts were accepted.
    `tokens`, `origins`: what was appended. Drafts after an accepted end-of-text token are left out of all of
    these. Under verification "common_stop", a row cut short by another row's rejection ends with one more accepted
    draft instead of a token of the target's; `accepted` does not count that draft. `next_p` is p of the token
    after the accepted drafts. NaN marks a number that does not exist (u under coupled verification, next_p of a
    prefill). A draft whose p or q was no distribution, and those after it, count as drafted and refused, though
    none of them was tested: p and q are NaN, and `chance` is 0 (in a tree NaN, as for all that was not tested).

    `parents`: where the drafts are a tree, the draft that each follows, or -1 for the newest token; then `path`
    lists the accepted ones. Both None: a chain, of which the first `accepted` were accepted. `detail`: with
    `inspect`, of a row that drafted. `logprobs`, `sampled_logprobs`: where they are asked for, of each of `tokens`
    by the model's plain softmax and by the distribution that is sampled. `drafted_text`: the drafts' texts. A lane
    fills in `start` and `drafted_text`; the latter stays None without a tokenizer.
    """

    sequence: int
    drafted: list[int]
    p: list[float]
    q: list[float]
    u: list[float]
    accepted: int
    # A snapshot has these once, in its sequences.
    tokens: list[int] = field(metadata=INNER)
    origins: list[str] = field(metadata=INNER)
    finish_reason: str | None = field(metadata=INNER)
    next_p: float = math.nan
    chance: list[float] = field(default_factory=list)
    parents: list[int] | None = None
    path: list[int] | None = None
    detail: RowDetail | None = None
    start: int = 0
    drafted_text: list[str] | None = None
    logprobs: list[float] | None = field(default=None, metadata=INNER)
    sampled_logprobs: list[float] | None = field(default=None, metadata=INNER)

    def record(self) -> Record:
        """Its fields as plain data, with `one_by_one` and `written`, the number of tokens that it appended."""
        return {**record_of(self), "one_by_one": self.one_by_one, "written": len(self.tokens)}

    @property
    def tested(self) -> list[bool]:
        """By depth from 1 on: whether the draft there was accepted, as far as a draft's parent stood.

        A chain's drafts up to and including the first rejected one; in a tree, the depths of the accepted path
        and, where its last draft has drafts after it, one more.
        """
        stood = [True] * self.accepted
        if self.parents is None:
            return stood + [False] * (len(self.drafted) > self.accepted)
        last = self.path[-1] if self.path else -1
        return stood + [False] * (last in self.parents)

    @property
    def one_by_one(self) -> int:
        """How many drafts the rejection rule would have accepted with the same numbers u.

        `accepted` without u, and of a tree, whose rule goes draft by draft as well.
        """
        if self.parents is not None or any(map(math.isnan, self.u)):
            return self.accepted
        failed = (i for i, (p, q, u) in enumerate(zip(self.p, self.q, self.u, strict=True)) if not u * q < p)
        return next(failed, len(self.drafted))

    @property
    def saved(self) -> int:
        """How many of the accepted drafts that rule would have lost: those from its first rejection on."""
        return max(0, self.accepted - self.one_by_one)


@dataclass(frozen=True)
class Reading:
    """How far a prefill is: `fed` of `total` tokens are in the target's cache.

    Tokens that several of these sequences begin with count once, and those that the cache still held not at all.
    `sequences`: indices of the sequences whose prompts are read.
    """

    fed: int
    total: int
    sequences: list[int]


@dataclass(frozen=True)
class Forward:
    """What one forward was fed, of each of its rows: how many tokens its cache held, and how many it was fed.

    counts: without padding. draft: whether it was the draft's, reading the prompts.
    """

    cached: list[int]
    counts: list[int]
    draft: bool = False


@dataclass
class WindowWork:
    """The target's windowed forwards of a round, in which it drafts for itself, summed up.

    tokens: that were fed, padding included; read: cached tokens that the forwards read, of all rows; seen: the
    same, counted for each token that sees them.
    """

    forwards: int = 0
    tokens: int = 0
    read: int = 0
    seen: int = 0

    def add(self, tokens: int, read: int, width: int) -> None:
        """One forward of `tokens` tokens, `width` a row, that reads `read` cached tokens."""
        self.forwards += 1
        self.tokens += tokens
        self.read += read
        self.seen += read * width


@dataclass
class Round:
    """One step of a decoder: kind "prefill" (one chunk; the last appends the first tokens), "plain" or "verify".

    `round`: a lane's number of it; verifications and plain steps count from 1, a prefill has 0. `lengths`: the
    length that the policy gave each row, in the order of `rows`, of a tree its depth; none in a prefill.
    `draft_length`: the longest of them. `time_ms`: the lane's clock at its end; it began where the round before it
    ended. `draft_ms`: of that the time of making the drafts, 0 if none was made and no draft model ran;
    `verify_ms`: the target's forward and the verdicts on the drafts, up to the round's wait for the device; the
    rest is the host's. Both are None in a prefill, and where draft and target work at the same time.

    `draft_forwards`: forward passes of the draft model. `draft_tokens`: tokens that the draft model drew; copied
    drafts do not count, unverified ones do. `windowed`: the target's work for drafts of its own, if it made any.
    `reading`: set while prompts are read; None in every other round. `explain`: with `inspect`, gives the rows
    their details; it must be called before the decoder's next step, and the lane does so off its clock. `fed`: the
    verification, or the chunk of a prefill, in which no rows mean that everything was held already; None: not
    known.
    """

    kind: str
    draft_length: int = 0
    # `record` adds those of the rows.
    rows: list[RowRound] = field(default_factory=list, metadata=INNER)
    time_ms: float = 0.0
    draft_forwards: int = 0
    draft_tokens: int = field(default=0, metadata=INNER)
    windowed: WindowWork | None = field(default=None, metadata=INNER)
    reading: Reading | None = field(default=None, metadata=INNER)
    explain: Callable[[], None] | None = field(default=None, repr=False, compare=False, metadata=INNER)
    fed: Forward | None = field(default=None, metadata=INNER)
    lengths: list[int] = field(default_factory=list)
    draft_ms: float | None = None
    verify_ms: float | None = None
    round: int = 0

    def record(self) -> Record:
        """Its fields as plain data, with those of its rows."""
        known: Record = record_of(self) | {"rows": [row.record() for row in self.rows]}
        for part in ("draft_ms", "verify_ms"):
            known[part] = None if known[part] is None else float(f"{known[part]:.{DECIMALS}f}")
        return known
