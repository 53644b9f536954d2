"""What a step of a decoder would have taken on a simulated clock, from what its forwards were fed.

Contract: a round is billed by the function that bench simulate plays its rounds with (`round_ms`), at the rows'
mean cached length. A draft model drafts one token a row and forward, and one level of a tree: who drafts more
after one forward is billed as many forwards. Copies cost nothing. A prefill is billed chunk by chunk, as it was
fed; a draft head's reading of the prompts, which takes the target's states, is not. What rows share counts for
each of them. Nothing is billed for the host. A decoder that does not tell what it fed (Round.fed) is counted by
its rows: their drafts, and of a prefill their whole prompts.
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
    """The milliseconds of one step, whose tokens the sequences already hold.

    runs_draft: whether the pair's draft runs. Without it the draft forwards of a target that drafts for itself are
    its own windowed ones.
    """
    fed = _counted(round_, sequences) if round_.fed is None else round_.fed
    if not fed.counts:
        return Spent(0.0, 0.0)
    costs = clock.costs(fmean(fed.cached))
    if round_.kind == "prefill":
        return _prefill(costs, fed)
    drafted = [count - 1 for count in fed.counts]
    draft_ms, verify_ms = round_ms(costs, drafted, _forwards(round_, drafted, runs_draft))
    windowed = 0.0 if round_.windowed is None else _windowed(costs, round_, len(drafted))
    return Spent(draft_ms + windowed, verify_ms)


def _counted(round_: Round, sequences: list[Sequence]) -> Forward:
    """What the rows of a round must have been fed, by what they wrote."""
    if round_.kind == "prefill":
        return Forward([0] * len(round_.rows), [len(sequences[row.sequence].prompt) for row in round_.rows])
    before = [len(sequences[row.sequence].tokens) - len(row.tokens) for row in round_.rows]
    # The newest token is not cached yet.
    return Forward([length - 1 for length in before], [1 + len(row.drafted) for row in round_.rows])


def _forwards(round_: Round, drafted: list[int], runs_draft: bool) -> int:
    """Forwards of a draft model for the round's drafts, but for those that the target ran on itself."""
    if round_.fed is None and not round_.draft_forwards:
        return max(drafted)
    if round_.windowed is not None:
        return round_.draft_forwards if runs_draft else 0
    trees = [depths_of(row.parents) for row in round_.rows if row.parents is not None]
    if trees:
        return max([round_.draft_forwards, *(depth for depths in trees for depth in depths)])
    return max(round_.draft_forwards, ceil(round_.draft_tokens / len(drafted)))


def _windowed(costs: RoundCosts, round_: Round, rows: int) -> float:
    """The target's forwards on itself; a table was measured with them, and has them for its draft's."""
    work = round_.windowed
    if work is None or not work.forwards:
        return 0.0
    if not isinstance(costs, Roofline):
        return work.forwards * costs.draft_ms(rows)
    seen = costs.seeing(work.read / (work.forwards * rows))
    return work.forwards * seen.draft_feed_ms(rows, work.tokens / work.forwards)


def _prefill(costs: RoundCosts, fed: Forward) -> Spent:
    """One chunk of a prefill; a table tells the draft's pace at one token a row alone, which is taken for it."""
    rows = len(fed.counts)
    tokens = rows * max(fed.counts) if costs.padded else sum(fed.counts)
    if not fed.draft:
        return Spent(0.0, costs.verify_ms(rows, tokens))
    if isinstance(costs, Roofline):
        return Spent(costs.draft_feed_ms(rows, tokens), 0.0)
    return Spent(costs.verify_ms(rows, tokens) * costs.draft_ms(rows) / costs.verify_ms(rows, rows), 0.0)
