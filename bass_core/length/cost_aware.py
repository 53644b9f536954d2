"""Draft lengths by measured cost, the default (`CostAware`): those with the most expected tokens per millisecond.

Before a round, each row offers a chain of drafts, from the source that its text so far determines (a copy, or the
draft model). The worth of a row's i-th draft is the probability that its first i drafts are accepted, estimated
for its source, row and position (acceptance.py). It is weighted down for rows that will finish early, because a
batch takes until its last row is finished. Drafts are taken in order of their worth over all rows, as many as give
the most expected tokens per millisecond. For example, with worths [0.8, 0.5] for the first row and
[0.6, 0.2] for the second, the three best drafts are two of the first row and one of the second. If a plain step
gives more tokens per millisecond, none are taken.

The lengths depend only on earlier rounds, so every verification rule stays exact.

Costs come from a table (costs.py), corrected with the measured time of each round. If a plain step looks best,
drafting is still tried as long as it would pay at rates of acceptance one standard error above the estimates, and
as long as the expected losses of these trials stay within a budget: the share START of the time that the batch
would take without drafts, plus EXPLORE of the time so far. So a drafter that is better than expected is found
early, and others cost little. If drafting looks best, a plain round is tried now and then.
Sources: expected tokens by position, Leviathan et al. 2211.17192, equation 1; one allotment over all rows by
goodput, vLLM's adaptive verification (#47808) and DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .acceptance import IDLE_MEMORY, MEMORY, AcceptanceEstimate, PastDrafts, Rates, SurvivalRate
from .base import Feedback, Offer
from .costs import CorrectedCosts, RoundCosts

# Exponent in the weight of a row: (its remaining rounds / those of the row with the most) ** REMAINING_EXPONENT.
# The remaining rounds are estimated as if each row drafted one token per round.
REMAINING_EXPONENT = 2
# The maximum number of drafts of one row, and of all rows together.
LIMIT, MAX_DRAFTS_PER_ROUND = 16, 96
PLACES = np.arange(1, LIMIT + 1)
# Draft only if the expected tokens per millisecond are at least this many times those of a plain step. The margin
# is there because the estimates for drafting are less certain than those for a plain step.
LEAST_GAIN = 1.05
# Before it drafts, a draft model has to read the text that it has not read yet. The time for this is spread over
# the rounds that are left, but over at most this many (before the first round: over all of them).
HORIZON = 16
# How much of the last row's delay counts. Less than all of it, because rounds cost less and drafts pay more as
# soon as other rows have finished. Half is a guess.
LAST_ROW_WEIGHT = 0.5
# The budget for trials of drafting, as shares of the batch's time without drafts and of the time so far.
START, EXPLORE = 0.015, 0.005
# A trial hopes for rates of acceptance DOUBT standard errors above the estimates. It may cost at most CHANCE of
# the time that drafting would then save, because the hope seldom comes true.
DOUBT, CHANCE = 1.0, 0.3
# After a plain round, skip planning for rounds with the same sources until a round drafts, but at most for this
# many rounds and for this many milliseconds. Planning takes a noticeable time compared with a small model's step.
MAX_SKIPPED_PLANS, MAX_SKIP_MS = 31, 100.0
# If drafting looks best, every second round after the first FIRST_ROUNDS is plain until PLAIN_TRIALS were, then
# one in PLAIN_EVERY. If a plain round would lose more than MAX_LOSS of its time, the rest has to fit the budget.
FIRST_ROUNDS, PLAIN_TRIALS, PLAIN_EVERY, MAX_LOSS = 1, 2, 48, 0.4


Places = NDArray[np.int64]


class RoundPlan(NamedTuple):
    """The draft lengths of a round.

    Attributes:
        lengths: one per row.
        charged_ms: the part of a trial's expected loss, in ms, that its budget has to pay.
        tries_plain: whether the round is a trial of a plain step.
    """

    lengths: list[int]
    charged_ms: float
    tries_plain: bool = False


class Candidates(NamedTuple):
    """Options for a round, the first one without drafts.

    Attributes:
        tokens: expected tokens of all rows, weighted, for each option.
        hoped: the same if the rates of acceptance are DOUBT standard errors higher.
        ms: time of each option.
        lengths: returns the draft lengths per row of option i.
    """

    tokens: Rates
    hoped: Rates
    ms: Rates
    lengths: Callable[[int], list[int]]


class CostAware:
    """The policy that the module docstring describes.

    Args:
        timed: whether the rounds' own times correct them.
        past: counts of earlier calls, which this policy adds to. None: there were none.
    """

    limit = LIMIT

    def __init__(self, table: RoundCosts, timed: bool = True, past: PastDrafts | None = None) -> None:
        self.costs = CorrectedCosts(table, timed)
        self._past: PastDrafts = {} if past is None else past
        self._estimates: dict[str, AcceptanceEstimate] = {}
        self._forwards = SurvivalRate(LIMIT, 1.0)
        # Milliseconds that trials may still lose: of the share EXPLORE, and of START (None: no row had an offer).
        self._allowance = 0.0
        self._start: float | None = None
        # Rounds so far, the plain ones among them, the round of the next plain trial, and that of the last
        # observation.
        self._rounds, self._plain, self._plain_due, self._observed = 0, 0, FIRST_ROUNDS, 0
        # The newest plan and the offers that it was made for.
        self._planned: tuple[Sequence[Offer], RoundPlan] | None = None
        # Keyed by the sources of a plain round's rows: the round until which planning is skipped for them.
        self._plain_until: dict[tuple[str, ...], int] = {}

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """See LengthPolicy."""
        return self.plan(offers).lengths

    def plan(self, offers: Sequence[Offer]) -> RoundPlan:
        """Return the plan of the next round: the best option, or a trial of another one."""
        if self._planned is not None and self._planned[0] is offers:
            return self._planned[1]
        usable = [min(max(offer.certain or offer.most, 0), LIMIT) for offer in offers]
        plan = RoundPlan([0] * len(offers), 0.0)
        if any(usable) and not self._skips_plan(offers):
            plan = self._plan(offers, usable)
        self._planned = offers, plan
        return plan

    def _plan(self, offers: Sequence[Offer], usable: list[int]) -> RoundPlan:
        tokens, hoped, ms, lengths = self._candidates(offers, usable)
        rates = tokens / ms
        best, least = 1 + int(rates[1:].argmax()), LEAST_GAIN * rates[0]
        if rates[best] > least:
            # Try plain rounds too, because a wrong time for them in the table would otherwise go unnoticed. The
            # times of wider rounds say little about them. Not in the first round: if that drafts, a draft model
            # reads the prompts during the prefill.
            lost = max(0.0, float(ms[0] - tokens[0] / rates[best]) - MAX_LOSS * float(ms[0]))
            if self.costs.timed and self._rounds >= self._plain_due and lost <= self._allowance:
                return RoundPlan(lengths(0), lost, True)
            return RoundPlan(lengths(best), 0.0)
        # This may be the only trial for a long time, so charge it all that a model which drafts must still read.
        best = 1 + int((hoped / ms)[1:].argmax())
        lost = max(0.0, float(ms[best] - tokens[best] / least))
        if any(n and offer.forwards for n, offer in zip(lengths(best), offers, strict=True)):
            lost += self._reading_ms(offers)
        left_ms = float(ms[0]) * _left(offers)
        saved = CHANCE * left_ms * float(1 - least * ms[best] / hoped[best])
        budget = self._allowance + (START * left_ms if self._start is None else self._start)
        # Even a trial that is unlikely to pay shows whether the times still hold.
        tried = lost <= min(saved, budget) or lost <= self._allowance
        return RoundPlan(lengths(best), lost) if tried else RoundPlan(lengths(0), 0.0)

    def _candidates(self, offers: Sequence[Offer], usable: list[int]) -> Candidates:
        """Return the options for a round: those of all rows, and those in which no model drafts.

        Without the latter, a row could copy a second token only if the model drafts the first ones of other rows,
        because their worth is higher. But the model's first token costs more: a forward, and the reading of its
        unread tokens.
        """
        every = self._options(offers, usable)
        copied = [0 if offer.forwards else most for most, offer in zip(usable, offers, strict=True)]
        if copied == usable or not any(copied):
            return every
        copies, count = self._options(offers, copied), len(every.ms)

        def lengths(index: int) -> list[int]:
            return every.lengths(index) if index < count else copies.lengths(index - count + 1)

        tokens, hoped, ms = (np.concatenate((a, b[1:])) for a, b in zip(every[:3], copies[:3], strict=True))
        return Candidates(tokens, hoped, ms, lengths)

    def _options(self, offers: Sequence[Offer], usable: list[int]) -> Candidates:
        """Return the options in which row r drafts at most usable[r] tokens.

        If padding costs as much as tokens, option i is that every row drafts i tokens, or as many as it can.
        Otherwise, it is the i drafts with the highest worths.
        """
        rows, allowed = len(offers), np.array(usable)[:, None] >= PLACES
        # float64 [2, rows, LIMIT]: chances that 1, 2, ... drafts of a row are accepted, expected and hoped for.
        # float64 [rows, LIMIT]: chances that it drafts that many if it is allowed to.
        chances, proposed = np.empty((2, rows, LIMIT)), np.empty((rows, LIMIT))
        for indices in _by_source(offers):
            estimate = self._estimate_for(offers[indices[0]])
            chances[:, indices] = estimate.accepted([offers[r].row for r in indices], (0.0, DOUBT))
            proposed[indices] = estimate.drafted.chances()
        forced = [r for r, offer in enumerate(offers) if offer.certain]
        chances[:, forced], proposed[forced] = 1.0, 1.0
        worths = allowed * chances * _remaining_weights(offers, chances[0, :, 0])[:, None]
        modelled = np.array([offer.forwards and most > 0 for offer, most in zip(offers, usable, strict=True)])
        if self.costs.padded:
            places = PLACES[: max(usable)]
            gains, verified, depths = worths.sum(1)[:, : len(places)], rows * places, places * modelled.any()
        else:
            # A stable sort, so that drafts of one row with equal worth stay in their order.
            order = np.argsort(-np.where(allowed, worths[0], -1.0).ravel(), kind="stable")
            order = order[: min(MAX_DRAFTS_PER_ROUND, sum(usable))]
            gains, verified = worths.reshape(2, -1)[:, order], proposed.ravel()[order].cumsum()
            places = PLACES[order % LIMIT]
            depths = np.maximum.accumulate(places * modelled[order // LIMIT])

        def lengths(index: int) -> list[int]:
            if self.costs.padded:
                return [min(most, index) for most in usable]
            counts: list[int] = np.bincount(order[:index] // LIMIT, minlength=rows).tolist()
            return counts

        gains = np.concatenate((np.zeros((2, 1)), gains), axis=1)
        verified, depths = (np.concatenate(([0], each)) for each in (verified, depths))
        tokens, left = rows + gains.cumsum(1), _left(offers)
        pace = tokens[0] / rows
        # The time to read unread tokens is spread over the rounds that are left: fewer if the pace is faster.
        rounds = left / pace if not self._rounds else np.minimum(HORIZON, left / pace)
        forwards = np.concatenate(([0.0], self._forwards.chances().cumsum()))[depths]
        ms = self.costs.verify_ms(rows, float(rows) + verified) + self.costs.draft_ms(rows, forwards, np.zeros(1))
        ms = ms + (depths > 0) * self._reading_ms(offers) / rounds
        # The expected square of the number of accepted drafts is the sum of (2i - 1) x (chance of i or more).
        squares = np.concatenate(([0.0], ((2 * places - 1) * gains[0, 1:]).cumsum())) / rows
        share = _last_row_share(rows, pace, np.maximum(squares - (pace - 1) ** 2, 0), left)
        return Candidates(share * tokens[0], share * tokens[1], ms, lengths)

    def _reading_ms(self, offers: Sequence[Offer]) -> float:
        """Return the time that the draft model needs to read its unread tokens."""
        return float(self.costs.draft_ms(len(offers), np.zeros(1), np.array([_unread(offers)]))[0])

    def _estimate_for(self, offer: Offer) -> AcceptanceEstimate:
        if offer.source not in self._estimates:
            past = self._past.setdefault(offer.source, np.zeros(2))
            self._estimates[offer.source] = AcceptanceEstimate(LIMIT, not offer.forwards, past)
        return self._estimates[offer.source]

    def observe(self, feedback: Feedback) -> None:
        """See LengthPolicy."""
        offers, rows, forwards = feedback.offers, len(feedback.offers), feedback.draft_forwards
        # Compute the plan that was made before this round, and pay for its trial if the round followed it.
        plan = self.plan(offers)
        if self._start is None and any(offer.most > 0 for offer in offers):
            self._start = START * _left(offers) * self._plain_ms(rows)
        if plan.charged_ms and feedback.lengths == plan.lengths:
            spent = min(plan.charged_ms, self._allowance)
            self._allowance -= spent
            self._start = (self._start or 0.0) - (plan.charged_ms - spent)
        self._allowance += EXPLORE * self._ms(feedback)
        skipped = self._skips_plan(offers)
        self._rounds, self._plain = self._rounds + 1, self._plain + (not any(feedback.lengths))
        if not any(feedback.lengths):
            self._plain_due = self._rounds + (1 if self._plain < PLAIN_TRIALS else PLAIN_EVERY)
        self._planned = None
        if any(plan.lengths) or plan.tries_plain:
            self._plain_until.clear()
        elif skipped:
            # While planning is skipped, don't observe plain rounds: their cost was observed a few rounds ago.
            return
        elif any(_sources(offers)):
            num_rounds = int(MAX_SKIP_MS / max(1e-3, self._ms(feedback)))
            self._plain_until[_sources(offers)] = self._rounds + min(MAX_SKIPPED_PLANS, num_rounds)
        if not any(feedback.lengths):
            for estimate in self._estimates.values():
                estimate.fade(IDLE_MEMORY ** (self._rounds - self._observed))
        self._observed = self._rounds
        # int64 [3, rows]: how many drafts each row was allowed, drafted and accepted.
        counts = np.minimum((feedback.lengths, feedback.drafted, feedback.accepted), LIMIT)
        # Don't learn from certain drafts.
        learned = [0 if offer.certain else n for n, offer in zip(feedback.lengths, offers, strict=True)]
        for indices in _by_source(offers, learned):
            estimate = self._estimate_for(offers[indices[0]])
            estimate.fade()
            estimate.add([offers[r].row for r in indices], *counts[:, indices])
        deepest = max(
            (n for n, offer in zip(counts[0].tolist(), offers, strict=True) if offer.forwards), default=0
        )
        if deepest:
            self._forwards.fade(MEMORY)
            self._forwards.add(np.array([min(forwards, deepest)]), np.array([deepest]))
        width = max(feedback.drafted)
        tokens = rows * (1 + width) if self.costs.padded else rows + sum(feedback.drafted)
        if not math.isnan(feedback.ms):
            drafting = (float(forwards), float(_unread(offers)), feedback.draft_ms) if forwards else None
            self.costs.observe(rows, tokens, feedback.ms - feedback.draft_ms, drafting)

    def _skips_plan(self, offers: Sequence[Offer]) -> bool:
        """Return whether to take a plain step in the next round without planning it."""
        return self._rounds < self._plain_until.get(_sources(offers), 0)

    def _ms(self, feedback: Feedback) -> float:
        """Return the time of the round, measured if possible, else from the costs."""
        if self.costs.timed and not math.isnan(feedback.ms):
            return feedback.ms
        return self._plain_ms(len(feedback.offers))

    def _plain_ms(self, rows: int) -> float:
        return float(self.costs.verify_ms(rows, np.array([float(rows)]))[0])


def _by_source(offers: Sequence[Offer], wanted: Sequence[int] | None = None) -> list[list[int]]:
    """Return lists of rows whose offers have the same source, without the rows for which `wanted` is 0."""
    rows: dict[str, list[int]] = {}
    for r, offer in enumerate(offers):
        if wanted is None or wanted[r]:
            rows.setdefault(offer.source, []).append(r)
    return list(rows.values())


def _sources(offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return the source of each row's drafts, sorted, or "" for a row without an offer."""
    return tuple(sorted(offer.source if offer.most > 0 else "" for offer in offers))


def _left(offers: Sequence[Offer]) -> int:
    """Return the number of tokens that the longest row has left to write."""
    return 1 + max(offer.most for offer in offers)


def _remaining_weights(offers: Sequence[Offer], first: Rates) -> Rates:
    """Return float64 [rows], the weight of one extra token in each row, smaller if the row will finish earlier.

    The mean over the rows that offer drafts is 1. For the other rows, the number of remaining tokens is unknown.

    Args:
        first: float64 [rows], the probability that a row's first draft is accepted.
    """
    rounds = np.maximum([offer.most for offer in offers], 0) / (1 + first)
    weights = (rounds / rounds.max()) ** REMAINING_EXPONENT
    return np.asarray(weights / weights[rounds > 0].mean())


def _last_row_share(rows: int, pace: Rates, variance: Rates, left: int) -> Rates:
    """Return the pace of the row that finishes last, as a share of the mean pace.

    Rows whose drafts are accepted equally often still finish at different times, and the batch takes until the
    last one. For example, 16 rows that write 64 tokens at 1.5 tokens per round, with variance 0.4, keep 0.95 of
    their mean pace. The number of rounds of a row has a relative standard deviation of sqrt(variance / (pace x
    left)). On average, the last of n rows is z_n standard deviations above the mean. z_n is the expected maximum
    of n standard normals (Blom's approximation).

    Args:
        rows: rows of the batch.
        pace: float64 [candidates], tokens per row and round.
        variance: float64 [candidates], of a row's tokens per round.
        left: tokens that the longest row has left to write.
    """
    spread = np.sqrt(variance / (pace * left))
    return np.asarray(1 / (1 + LAST_ROW_WEIGHT * NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25)) * spread))


def _unread(offers: Sequence[Offer]) -> int:
    """Return the number of tokens that the draft model has to read before it drafts."""
    return sum(offer.unread for offer in offers if offer.forwards)
