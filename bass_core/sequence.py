"""One sequence of a batch while it is being generated, and the record of a round.

A Sequence holds its prompt, its new tokens, where and when each of them came from, and why it ended. Round and
RowRound are the one record of what happened in a round. Their `record` is the JSON that snapshots, recordings,
exports and the page's script read: the fields by name, without those marked INNER.

This module handles no tensors, models or clocks; the caller passes times in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

# A dataclass as plain data: field names and values.
Record = dict[str, Any]
# Marks a field that a record leaves out: `field(metadata=INNER)`.
INNER = {"inner": True}
# Decimals kept of draft_ms and verify_ms.
DECIMALS = 4


def record_of(value: Any) -> Any:
    """Return the value as a copy in plain data: dataclasses become dictionaries, NaN becomes None."""
    if is_dataclass(value):
        cls: Any = type(value)
        return {name: record_of(getattr(value, name)) for name in _recorded_fields(cls)}
    if isinstance(value, list):
        if value and is_dataclass(value[0]):
            return [record_of(item) for item in value]
        # Only NaN differs from itself.
        return [item if item == item else None for item in value]
    return value if value == value else None


@cache
def _recorded_fields(cls: Any) -> list[str]:
    """Return the names of the dataclass's fields that a record includes."""
    return [item.name for item in fields(cls) if not item.metadata]


@dataclass
class Sequence:
    """One sequence of a batch.

    Attributes:
        id: key of the sequence's random numbers.
        eos: token ids that end the sequence.
        token_ids: the new tokens only; `tokens` also has the prompt.
        origins: where each new token came from, e.g. "accepted" or "bonus".
        times_ms: when each new token was written, on the lane's clock.
        finish_reason: "eos", "stop", "grammar" (its grammar is complete) or "length"; None while it is being
            generated.
        prefilled_ms: when the whole prompt had been read, on the lane's clock; None before.
        stopped: called with each new token in turn; True if the text up to that token contains a stop string. None
            if there are no stop strings.
        grammar: follows the text and knows which tokens may come next (Matcher in sample/grammar.py), or None.
        logprobs: log-probability of each new token under the model's plain softmax; empty unless requested.
        sampled_logprobs: the same under the distribution that is sampled.
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
    grammar: Any = None
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def remaining(self) -> int:
        """Number of tokens that the sequence may still get."""
        return self.max_new_tokens - len(self.token_ids)

    def write(self, tokens: list[int], origins: list[str]) -> int:
        """Append tokens until one of them ends the sequence; return the number appended."""
        remaining, count = self.remaining, 0
        for count, token in enumerate(tokens, start=1):
            complete = token not in self.eos and self.grammar is not None and self.grammar.write(token)
            if token in self.eos:
                self.finish_reason = "eos"
            elif self.stopped is not None and self.stopped(token):
                self.finish_reason = "stop"
            elif complete:
                self.finish_reason = "grammar"
            elif count == remaining:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.token_ids += tokens[:count]
        self.tokens += tokens[:count]
        self.origins += origins[:count]
        return count


def depths_of(parents: list[int]) -> list[int]:
    """Return the depth of each draft of a tree, 1 right after the newest token; `parents` as in RowRound."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


@dataclass
class Candidate:
    """A token that could have been written at one position.

    None marks a number that the rule does not use there.

    Attributes:
        q: the draft's probability.
        residual: the token's probability in the normalised residual max(0, p - q), from which a recovered token is
            drawn.
        text: the token's text, filled in by a lane with a tokenizer.
    """

    token: int
    p: float
    q: float | None
    residual: float | None
    text: str | None = None


@dataclass(frozen=True)
class Ending:
    """The position where a round ended with a token of the target.

    Attributes:
        after: number of accepted drafts before it.
        draft: index of the rejected draft that the token replaces; None if no draft was tested there.
        mass: sum over all tokens of the residual max(0, reach * p - q); None if the token was not drawn from a
            residual.
        reach: factor of p under block verification (verify/block.py); 1 under the other rules.
        top: the eight most likely tokens, then the rejected draft and the written token unless they are among
            them.
    """

    after: int
    draft: int | None
    mass: float | None
    reach: float
    top: list[Candidate]


@dataclass(frozen=True)
class RowDetail:
    """Details of a row's round, for a reader who follows it step by step.

    Attributes:
        rule: how drafts were judged: "rejection", "block", "tree", "coupled", "greedy" or, under
            `synthetic_acceptance`, "coin".
        sources: who proposed each draft: "head", "model", "copy", "window", "grammar" (certain) or
            "drafter".
        own_p: greedy only: each draft's probability under the target at temperature 1.
        own_q: greedy only: each draft's probability under the draft at temperature 1, or None if not known.
        ending: None if the round ended with an accepted draft.
    """

    rule: str
    sources: list[str]
    own_p: list[float | None] | None
    own_q: list[float | None] | None
    ending: Ending | None


@dataclass
class RowRound:
    """The effect of one round on one sequence.

    Drafts after an accepted end-of-text token are left out of every field. Under verification "common_stop", a row
    that another row's rejection cuts short ends with one more accepted draft instead of a token of the target;
    `accepted` does not count that draft. If p or q of a draft is not a valid distribution, that draft and all
    later drafts are rejected without a test. Their p and q are NaN. Their `chance` is 0 in a chain, and NaN in a
    tree, in which all untested drafts have NaN.

    Attributes:
        sequence: index of the sequence.
        q: the draft's probability of each draft.
        u: the uniform number that tested each draft; NaN if there is none, e.g. under coupled verification.
        origins: where each of `tokens` came from.
        finish_reason: why the sequence ended in this round, or None.
        next_p: p of the token after the accepted drafts; NaN in a prefill.
        chance: the number that u had to be below for each draft.
        parents: for trees, the draft that each draft follows, or -1 for the newest token; None for a chain.
        path: for trees, the accepted drafts; None for a chain, whose first `accepted` drafts are accepted.
        detail: set by `inspect`, for a row that drafted.
        start: index of the first of `tokens` among the sequence's new tokens; filled in by a lane.
        drafted_text: the drafts' texts; filled in by a lane with a tokenizer.
        certain: whether its drafts are tokens that the row's grammar forces; False without drafts. The token after
            them may be forced too.
        logprobs: log-probability of each of `tokens` under the model's plain softmax, if requested.
        sampled_logprobs: the same under the distribution that is sampled.
    """

    sequence: int
    drafted: list[int]
    p: list[float]
    q: list[float]
    u: list[float]
    accepted: int
    # `tokens` and `origins` are not recorded here, because a snapshot's sequences have them.
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
    certain: bool = False
    logprobs: list[float] | None = field(default=None, metadata=INNER)
    sampled_logprobs: list[float] | None = field(default=None, metadata=INNER)

    def record(self) -> Record:
        """Return its fields as plain data, plus `one_by_one` and `written`, the number of appended tokens."""
        return {**record_of(self), "one_by_one": self.one_by_one, "written": len(self.tokens)}

    @property
    def tested(self) -> list[bool]:
        """Whether each tested draft was accepted, by depth from 1.

        For a chain: its drafts up to and including the first rejected one. For a tree: the depths of the accepted
        path, plus one more if drafts follow the last accepted one.
        """
        accepted = [True] * self.accepted
        if self.parents is None:
            return accepted + [False] * (len(self.drafted) > self.accepted)
        last = self.path[-1] if self.path else -1
        return accepted + [False] * (last in self.parents)

    @property
    def one_by_one(self) -> int:
        """How many drafts the rejection rule would have accepted with the same numbers u.

        Equals `accepted` if there is no u. It also does for trees, because the tree rule tests draft by draft.
        """
        if self.parents is not None or any(map(math.isnan, self.u)):
            return self.accepted
        rejected = (i for i, (p, q, u) in enumerate(zip(self.p, self.q, self.u, strict=True)) if not u * q < p)
        return next(rejected, len(self.drafted))

    @property
    def saved(self) -> int:
        """How many of the accepted drafts the rejection rule would not have accepted."""
        return max(0, self.accepted - self.one_by_one)


@dataclass(frozen=True)
class Reading:
    """Progress of a prefill.

    Attributes:
        fed: tokens in the target's cache so far.
        total: tokens to feed. A prefix that several sequences share counts once, a prefix already cached not at
            all.
        sequences: indices of the sequences whose prompts are being read.
    """

    fed: int
    total: int
    sequences: list[int]


@dataclass(frozen=True)
class Forward:
    """The input sizes of one forward, by row.

    Attributes:
        cached: number of tokens in the row's cache before it.
        counts: number of tokens fed, without padding.
        draft: True if this is a forward of the draft model, which reads the prompts.
    """

    cached: list[int]
    counts: list[int]
    draft: bool = False


@dataclass
class WindowWork:
    """All windowed forwards of a round in which the target drafts for itself.

    Attributes:
        tokens: tokens fed, padding included.
        read: cached tokens that the forwards read, over all rows.
        seen: the cached tokens that each fed token attends to, summed over all fed tokens.
    """

    forwards: int = 0
    tokens: int = 0
    read: int = 0
    seen: int = 0

    def add(self, tokens: int, read: int, width: int) -> None:
        """Add one forward, which is fed `tokens` tokens, `width` per row, and reads `read` cached tokens."""
        self.forwards += 1
        self.tokens += tokens
        self.read += read
        self.seen += read * width


@dataclass
class Round:
    """One step of a decoder.

    Attributes:
        kind: "prefill" (one chunk of the prompts; the last one appends the first tokens), "plain" or "verify".
        draft_length: the largest of `lengths`.
        time_ms: the lane's clock when this step ended; it began when the step before it ended.
        draft_forwards: forwards of the draft model.
        draft_tokens: tokens drawn by the draft model, verified or not; copied drafts do not count.
        windowed: the target's work for drafting, if it drafted for itself.
        reading: progress of a prefill; None in every other round.
        explain: set by `inspect`: fills in the rows' details. The lane calls it before the decoder's next step,
            with its clock stopped.
        fed: input sizes of the verification or of the prefill chunk, or None if not known. A prefill without rows
            means that everything was cached already.
        lengths: the draft length that the policy gave each row (for trees the depth), in the order of `rows`;
            under AMUSD, which has no policy, the drafts that were judged. Empty in a prefill.
        draft_ms: time spent on drafting; 0 if nothing was drafted and no draft model ran. None in a prefill, and
            if draft and target work at the same time.
        verify_ms: time of the target's forward and the verification, including the round's wait for the device;
            None if `draft_ms` is None. The rest of the round is work of the host.
        round: number of the round in its lane, counted from 1; 0 for a prefill.
    """

    kind: str
    draft_length: int = 0
    # `record` adds the rows' own records.
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
        """Return its fields as plain data, with those of its rows."""
        data: Record = record_of(self) | {"rows": [row.record() for row in self.rows]}
        for key in ("draft_ms", "verify_ms"):
            data[key] = None if data[key] is None else float(f"{data[key]:.{DECIMALS}f}")
        return data
