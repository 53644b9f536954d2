"""Billing: the time that a decoder's step would have taken on a simulated clock (`bill`).

A round is billed by the function that bench simulate uses (`round_ms`), at the rows' mean cached length. We assume
that a draft model drafts one token per row and forward, or one level of a tree: a drafter that drafts N tokens
after one forward is billed N forwards. Copies cost nothing. A prefill is billed by its chunks, but a
draft head's reading of the prompts is not billed. A prefix that several rows share is billed as part of each row's
cached length, as if each row had its own copy.

If a decoder does not report its forwards (Round.fed), they are guessed from the texts: each row was fed its newest
token and its drafts, or its whole prompt in a prefill.
"""

from __future__ import annotations

from math import ceil
from statistics import fmean
from typing import NamedTuple

from ..length.costs import RoundCosts
from ..sequence import Forward, Round, Sequence, depths_of
from .clock import SimulatedClock
from .roofline import Roofline
from .rounds import round_ms


class Spent(NamedTuple):
    """Milliseconds of drafting, and of the verification or of a prefill's chunk."""

    draft_ms: float
    verify_ms: float


def bill(clock: SimulatedClock, round_: Round, sequences: list[Sequence], runs_draft: bool = True) -> Spent:
    """Return the milliseconds of one step, whose tokens are already written.

    Args:
        runs_draft: whether the lane runs the pair's draft. If it does not run the draft and the target drafts for
            itself, all draft forwards are windowed forwards of the target.
    """
    fed = _fed_by_text(round_, sequences) if round_.fed is None else round_.fed
    if not fed.counts:
        return Spent(0.0, 0.0)
    costs = clock.costs(fmean(fed.cached))
    if round_.kind == "prefill":
        return _prefill(costs, fed)
    drafted = [count - 1 for count in fed.counts]
    forwards = _forwards(round_, drafted, runs_draft)
    draft_ms, verify_ms = round_ms(costs, drafted, forwards)
    windowed = 0.0 if round_.windowed is None else _windowed(costs, round_, len(drafted))
    if windowed and not forwards:
        windowed += costs.proposal_ms(len(drafted))
    return Spent(draft_ms + windowed, verify_ms)


def _fed_by_text(round_: Round, sequences: list[Sequence]) -> Forward:
    """Return the forward of a round that did not report it, from the rows' texts."""
    if round_.kind == "prefill":
        return Forward([0] * len(round_.rows), [len(sequences[row.sequence].prompt) for row in round_.rows])
    before = [len(sequences[row.sequence].tokens) - len(row.tokens) for row in round_.rows]
    # The newest token is not cached yet.
    return Forward([length - 1 for length in before], [1 + len(row.drafted) for row in round_.rows])


def _forwards(round_: Round, drafted: list[int], runs_draft: bool) -> int:
    """Return the number of the draft model's forwards in a round, without windowed forwards of the target."""
    if round_.fed is None and not round_.draft_forwards:
        return max(drafted)
    if round_.windowed is not None:
        return round_.draft_forwards if runs_draft else 0
    trees = [depths_of(row.parents) for row in round_.rows if row.parents is not None]
    if trees:
        return max([round_.draft_forwards, *(depth for depths in trees for depth in depths)])
    return max(round_.draft_forwards, ceil(round_.draft_tokens / len(drafted)))


def _windowed(costs: RoundCosts, round_: Round, rows: int) -> float:
    """Return the time of a round's windowed forwards of the target.

    A table of measured step times lists such forwards as forwards of the draft.
    """
    work = round_.windowed
    if work is None or not work.forwards:
        return 0.0
    if not isinstance(costs, Roofline):
        return work.forwards * costs.draft_ms(rows)
    seen = costs.seeing(work.read / (work.forwards * rows))
    return work.forwards * seen.draft_feed_ms(rows, work.tokens / work.forwards)


def _prefill(costs: RoundCosts, fed: Forward) -> Spent:
    """Bill one chunk of a prefill.

    For a draft, a table has only the time of a forward with one token per row. So a chunk of n tokens is billed as
    that time, times the target's time for n tokens, divided by its time for one token per row.
    """
    rows = len(fed.counts)
    tokens = rows * max(fed.counts) if costs.padded else sum(fed.counts)
    if not fed.draft:
        return Spent(0.0, costs.verify_ms(rows, tokens))
    if isinstance(costs, Roofline):
        return Spent(costs.draft_feed_ms(rows, tokens), 0.0)
    return Spent(costs.verify_ms(rows, tokens) * costs.draft_ms(rows) / costs.verify_ms(rows, rows), 0.0)
