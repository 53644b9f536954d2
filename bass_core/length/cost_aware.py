"""Row lengths by measured cost, the default: the drafts that should write most tokens a millisecond.

Contract: a policy (base.py). Before anything of a round is drawn, each row offers a chain of drafts by a source
that its text so far decides (a copy, or the draft model). The worth of a row's i-th draft is the chance that its
first i drafts are accepted, by source, row and place (acceptance.py). It counts less for a row that has less to
write than others, because a batch takes until its last row is finished. Drafts are taken best first over
all rows, as many as make expected tokens a millisecond the most; none where a plain step does. So the lengths are
a function of earlier rounds alone, and every rule of verification stays exact. Costs come from a table
(costs.py) that every round's own time corrects. What is not chosen is tried now and then, for
what it may cost: at most EXPLORE of the time. So a lane that would win again finds out, and one that loses loses
little. Source: expected tokens by place, Leviathan et al. 2211.17192, equation 1; one allotment over all rows by
goodput, vLLM's adaptive verification (#47808) and DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .acceptance import Believed, Rates, Reach
from .base import Feedback, Offer
from .costs import CorrectedCosts, RoundCosts

# How much more a row counts that has more to write than another: the exponent of their ratio.
BEHIND = 2
# The longest draft of a row, and the most drafts of all rows together.
LIMIT, MOST = 16, 96
PLACES = np.arange(1, LIMIT + 1)
# Drafting has to promise this much more than a plain step: estimates err, and a plain step's err least.
LEAST_GAIN = 1.02
# The rounds over which it pays off to let the draft model read what it has not read yet: at most HORIZON, except
# before the first round, where it reads the prompts for the whole text.
HORIZON = 16
# The share of the time that trying what seems to lose may cost.
EXPLORE = 0.01
# After a plain round those with the same sources are plain without a plan for so many rounds at most, and so many
# milliseconds, as long as nothing is drafted: what a plan takes can be felt beside a small model's step.
RESTS, REST_MS = 31, 100.0
# What a first plain round may cost beyond that, in plain steps, and the rounds after which it is tried.
FIRST_TRY, FIRST_ROUNDS = 0.4, 4


Places = NDArray[np.int64]


class Plan(NamedTuple):
    """The lengths by row of a round, and the ms that it should lose beside the one that seems best."""

    lengths: list[int]
    lost: float


class Ways(NamedTuple):
    """Ways to spend a round, the first without drafts. tokens: that all rows should write, weighted; ms: what it
    takes. lengths(i): of each row, the i-th way.
    """

    tokens: Rates
    ms: Rates
    lengths: Callable[[int], list[int]]


class CostAware:
    """See the module's contract. table: costs of rounds; timed: whether the rounds' own times correct it."""

    limit = LIMIT

    def __init__(self, table: RoundCosts, timed: bool = True) -> None:
        self.costs = CorrectedCosts(table, timed)
        self._believed: dict[str, Believed] = {}
        self._forwards = Reach(LIMIT, 1.0)
        # Milliseconds that may be lost by trying.
        self._allowance = 0.0
        # Rounds so far, and whether any of them was plain.
        self._rounds, self._plain = 0, False
        # The newest plan, and what it was asked about.
        self._planned: tuple[Sequence[Offer], Plan] | None = None
        # The rows' sources for which a plain round was best, and until which round it is taken to be.
        self._resting: dict[tuple[str, ...], int] = {}

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """See LengthPolicy."""
        return self.plan(offers).lengths

    def plan(self, offers: Sequence[Offer]) -> Plan:
        """The lengths of the next round: the best, or where it may be tried the best of the other kind."""
        if self._planned is not None and self._planned[0] is offers:
            return self._planned[1]
        usable, found = [min(max(offer.most, 0), LIMIT) for offer in offers], Plan([0] * len(offers), 0.0)
        if any(usable) and not self._rests(offers):
            found = self._plan(offers, usable)
        self._planned = offers, found
        return found

    def _plan(self, offers: Sequence[Offer], usable: list[int]) -> Plan:
        ways = self._columns(offers, usable) if self.costs.padded else self._drafts(offers, usable)
        rates = ways.tokens / ways.ms
        best = 1 + int(rates[1:].argmax())
        chosen, other = (best, 0) if rates[best] > LEAST_GAIN * rates[0] else (0, best)
        lost = max(0.0, float(ways.ms[other] - ways.tokens[other] / rates[chosen]))
        if other:
            # A try may be the last for long, and then pays for the reading alone.
            lost += self._reading_ms(offers)
        # A plain round is tried early, without which a table that is wrong about it would go on unnoticed; not
        # at once, because a draft that is wanted in the first round reads the prompts before it.
        early = other == 0 and not self._plain and self._rounds >= FIRST_ROUNDS
        spare = FIRST_TRY * float(ways.ms[0]) if early else 0.0
        if lost > self._allowance + spare:
            return Plan(ways.lengths(chosen), 0.0)
        return Plan(ways.lengths(other), lost)

    def _drafts(self, offers: Sequence[Offer], usable: list[int]) -> Ways:
        """Where a draft costs its own place alone: the best 0, 1, 2, ... drafts of all rows."""
        rows = len(offers)
        believed = [self._of(offer) for offer in offers]
        allowed = np.array(usable)[:, None] >= PLACES
        chances = np.array([of.accepted(offer.row) for of, offer in zip(believed, offers, strict=True)])
        worths = np.where(allowed, chances * _need(offers)[:, None], -1.0).ravel()
        # Stable, so that of a row's drafts of equal worth the first comes first.
        order = np.argsort(-worths, kind="stable")[: min(MOST, sum(usable))]
        shares = np.array([of.drafted.chances() for of in believed]).ravel()[order]
        depths = np.where([[offer.forwards] for offer in offers], PLACES, 0).ravel()[order]
        start = np.zeros(1)
        tokens = rows + np.concatenate((start, worths[order].cumsum()))
        steps = rows + np.concatenate((start, shares.cumsum()))
        deepest = np.concatenate(([0], np.maximum.accumulate(depths)))
        ms = self.costs.verify_ms(rows, steps) + self._drafting_ms(offers, deepest)
        return Ways(tokens, ms, lambda way: np.bincount(order[:way] // LIMIT, minlength=rows).tolist())

    def _columns(self, offers: Sequence[Offer], usable: list[int]) -> Ways:
        """Where padding costs what tokens cost: 0, 1, 2, ... drafts of every row."""
        rows, places = len(offers), np.arange(max(usable) + 1)
        tokens = np.full(len(places), float(rows))
        for offer, most, need in zip(offers, usable, _need(offers), strict=True):
            gained = np.concatenate(([0.0], self._of(offer).accepted(offer.row).cumsum()))
            tokens += need * gained[np.minimum(places, most)]
        deepest = places * any(offer.forwards and most > 0 for offer, most in zip(offers, usable, strict=True))
        ms = self.costs.verify_ms(rows, rows * (1.0 + places)) + self._drafting_ms(offers, deepest)
        return Ways(tokens, ms, lambda way: [min(max(most, 0), way) for most in usable])

    def _drafting_ms(self, offers: Sequence[Offer], deepest: Places) -> Rates:
        """What the draft model takes for chains of these lengths, with a share of what it must read before."""
        forwards = np.concatenate(([0.0], self._forwards.chances().cumsum()))[deepest]
        left = 1 + max(offer.most for offer in offers)
        rounds = min(HORIZON, left) if self._rounds else left
        return self.costs.draft_ms(len(offers), forwards, np.zeros(1)) + np.where(
            deepest > 0, self._reading_ms(offers) / rounds, 0.0
        )

    def _reading_ms(self, offers: Sequence[Offer]) -> float:
        """What the draft model takes to read what it has not read yet."""
        return float(self.costs.draft_ms(len(offers), np.zeros(1), np.array([_unread(offers)]))[0])

    def _of(self, offer: Offer) -> Believed:
        return self._believed.setdefault(offer.source, Believed(LIMIT, not offer.forwards))

    def observe(self, feedback: Feedback) -> None:
        """See LengthPolicy."""
        offers, rows, forwards = feedback.offers, len(feedback.offers), feedback.draft_forwards
        # As it was before this round: what it tried is paid for, else what may be tried grows.
        plan = self.plan(offers)
        tried = plan.lost if feedback.lengths == plan.lengths else 0.0
        self._allowance += EXPLORE * self._ms(feedback) - tried
        rested = self._rests(offers)
        self._rounds, self._plain = self._rounds + 1, self._plain or not any(feedback.lengths)
        self._planned = None
        if any(plan.lengths) or plan.lost:
            # A plain round that was only tried says nothing of the next.
            self._resting.clear()
        elif rested:
            # Its cost was seen a moment ago.
            return
        elif any(_sources(offers)):
            rests = int(REST_MS / max(1e-3, self._ms(feedback)))
            self._resting[_sources(offers)] = self._rounds + min(RESTS, rests)
        drafted = list(zip(offers, feedback.lengths, feedback.drafted, feedback.accepted, strict=True))
        for source in {offer.source for offer, allowed, _, _ in drafted if allowed}:
            self._believed[source].fade()
        for offer, allowed, count, accepted in drafted:
            if allowed:
                self._of(offer).add(offer.row, *(min(n, LIMIT) for n in (allowed, count, accepted)))
        deepest = max((allowed for offer, allowed, _, _ in drafted if offer.forwards), default=0)
        if deepest:
            self._forwards.fade()
            self._forwards.add(min(forwards, deepest, LIMIT), min(deepest, LIMIT))
        width = max(feedback.drafted)
        tokens = rows * (1 + width) if self.costs.padded else rows + sum(feedback.drafted)
        if not math.isnan(feedback.ms):
            drafting = (float(forwards), float(_unread(offers)), feedback.draft_ms) if forwards else None
            self.costs.observe(rows, tokens, feedback.ms - feedback.draft_ms, drafting)

    def _rests(self, offers: Sequence[Offer]) -> bool:
        """Whether the next round is plain without a plan."""
        return self._rounds < self._resting.get(_sources(offers), 0)

    def _ms(self, feedback: Feedback) -> float:
        """What the round took, by the clock or else by the costs."""
        if self.costs.timed and not math.isnan(feedback.ms):
            return feedback.ms
        rows = len(feedback.offers)
        return float(self.costs.verify_ms(rows, np.array([float(rows)]))[0])


def _sources(offers: Sequence[Offer]) -> tuple[str, ...]:
    """Who would draft, once for each row, in no row's order; "" where nothing is on offer."""
    return tuple(sorted(offer.source if offer.most > 0 else "" for offer in offers))


def _need(offers: Sequence[Offer]) -> Rates:
    """float64 [rows]: what a token more of each row counts; less the less the row has to write beside others.

    1 on average over the rows that offer drafts; of another row it is not known what it has to write.
    """
    left = np.array([max(offer.most, 0.0) for offer in offers])
    need = (left / left.max()) ** BEHIND
    return np.asarray(need / need[left > 0].mean())


def _unread(offers: Sequence[Offer]) -> int:
    """Tokens that the draft model reads before it drafts for any row."""
    return sum(offer.unread for offer in offers if offer.forwards)
