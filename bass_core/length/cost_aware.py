"""Draft lengths by measured cost, the default (`CostAware`): those with the most expected tokens per millisecond.

Before a round, each row offers a chain of drafts, from the source that its text so far determines (a copy, or the
draft model). The worth of a row's i-th draft is the probability that its first i drafts are accepted, estimated
for its source, row and position (acceptance.py). It is weighted down for rows with fewer tokens left to write,
because a batch takes until its last row is finished. Drafts are taken in order of their worth over all rows, as
many as give the most expected tokens per millisecond. For example, with worths [0.8, 0.5] for the first row and
[0.6, 0.2] for the second, the three best drafts are two of the first row and one of the second. If a plain step
gives more tokens per millisecond, none are taken.

The lengths depend only on earlier rounds, so every verification rule stays exact.

Costs come from a table (costs.py), corrected with the measured time of each round. The option that looks worse
(drafting, or a plain step) is still tried now and then, for at most the share EXPLORE of the time. So a lane
notices when drafting begins to pay, and loses little if it never does.
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

from .acceptance import AcceptanceEstimate, Rates, SurvivalRate
from .base import Feedback, Offer
from .costs import CorrectedCosts, RoundCosts

# Exponent in the weight of a row: (its remaining tokens / those of the row with the most) ** REMAINING_EXPONENT.
REMAINING_EXPONENT = 2
# The maximum number of drafts of one row, and of all rows together.
LIMIT, MAX_DRAFTS_PER_ROUND = 16, 96
PLACES = np.arange(1, LIMIT + 1)
# Draft only if the expected tokens per millisecond are at least this many times those of a plain step. The margin
# is there because the estimates for drafting are less certain than those for a plain step.
LEAST_GAIN = 1.02
# Before it drafts, a draft model has to read the text that it has not read yet. The time for this is spread over
# the rounds that are left, but over at most this many (before the first round: over all of them).
HORIZON = 16
# How much of the last row's delay counts. Less than all of it, because rounds cost less and drafts pay more as
# soon as other rows have finished. Half is a guess.
LAST_ROW_WEIGHT = 0.5
# Share of the time that may be lost by trying the option that looks worse.
EXPLORE = 0.01
# After a plain round, skip planning for rounds with the same sources until a round drafts, but at most for this
# many rounds and for this many milliseconds. Planning takes a noticeable time compared with a small model's step.
MAX_SKIPPED_PLANS, MAX_SKIP_MS = 31, 100.0
# After FIRST_ROUNDS rounds that all drafted, a plain round may be tried early: the time that it may lose is raised
# by the time of FIRST_TRY plain steps.
FIRST_TRY, FIRST_ROUNDS = 0.4, 4


Places = NDArray[np.int64]


class RoundPlan(NamedTuple):
    """The draft length of each row, and the expected loss in ms compared with the option that looks best."""

    lengths: list[int]
    lost: float


class Candidates(NamedTuple):
    """Options for a round, the first one without drafts.

    Attributes:
        tokens: expected tokens of all rows, weighted, for each option.
        ms: time of each option.
        lengths: returns the draft lengths per row of option i.
    """

    tokens: Rates
    ms: Rates
    lengths: Callable[[int], list[int]]


class CostAware:
    """The policy that the module docstring describes.

    Args:
        table: costs of rounds.
        timed: whether the rounds' own times correct them.
    """

    limit = LIMIT

    def __init__(self, table: RoundCosts, timed: bool = True) -> None:
        self.costs = CorrectedCosts(table, timed)
        self._estimates: dict[str, AcceptanceEstimate] = {}
        self._forwards = SurvivalRate(LIMIT, 1.0)
        # Milliseconds that may still be lost by trying the option that looks worse.
        self._allowance = 0.0
        # Rounds so far, and whether any of them was plain.
        self._rounds, self._plain = 0, False
        # The newest plan and the offers that it was made for.
        self._planned: tuple[Sequence[Offer], RoundPlan] | None = None
        # Keyed by the sources of a plain round's rows: the round until which planning is skipped for them.
        self._plain_until: dict[tuple[str, ...], int] = {}

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """See LengthPolicy."""
        return self.plan(offers).lengths

    def plan(self, offers: Sequence[Offer]) -> RoundPlan:
        """Return the plan of the next round: the best option, or the one that looks worse if it may be tried."""
        if self._planned is not None and self._planned[0] is offers:
            return self._planned[1]
        usable, plan = [min(max(offer.most, 0), LIMIT) for offer in offers], RoundPlan([0] * len(offers), 0.0)
        if any(usable) and not self._skips_plan(offers):
            plan = self._plan(offers, usable)
        self._planned = offers, plan
        return plan

    def _plan(self, offers: Sequence[Offer], usable: list[int]) -> RoundPlan:
        candidates = (
            self._common_lengths(offers, usable) if self.costs.padded else self._per_row_lengths(offers, usable)
        )
        rates = candidates.tokens / candidates.ms
        best = 1 + int(rates[1:].argmax())
        chosen, other = (best, 0) if rates[best] > LEAST_GAIN * rates[0] else (0, best)
        lost = max(0.0, float(candidates.ms[other] - candidates.tokens[other] / rates[chosen]))
        if other:
            # This may be the only trial for a long time, so charge it the full cost of catching up.
            lost += self._reading_ms(offers)
        # Try a plain round early, because a wrong time for it in the table would otherwise go unnoticed. Don't do
        # so in the first rounds: if the first round drafts, the draft model reads the prompts during the prefill.
        early = other == 0 and not self._plain and self._rounds >= FIRST_ROUNDS
        spare = FIRST_TRY * float(candidates.ms[0]) if early else 0.0
        if lost > self._allowance + spare:
            return RoundPlan(candidates.lengths(chosen), 0.0)
        return RoundPlan(candidates.lengths(other), lost)

    def _per_row_lengths(self, offers: Sequence[Offer], usable: list[int]) -> Candidates:
        """Return one candidate per total number of drafts 0, 1, 2, ...: the drafts with the highest worths.

        Used if padding costs nothing.
        """
        rows = len(offers)
        estimates = [self._estimate_for(offer) for offer in offers]
        allowed = np.array(usable)[:, None] >= PLACES
        chances = np.array(
            [estimate.accepted(offer.row) for estimate, offer in zip(estimates, offers, strict=True)]
        )
        worths = np.where(allowed, chances * _remaining_weights(offers)[:, None], -1.0).ravel()
        # A stable sort, so that drafts of one row with equal worth stay in their order.
        order = np.argsort(-worths, kind="stable")[: min(MAX_DRAFTS_PER_ROUND, sum(usable))]
        shares = np.array([estimate.drafted.chances() for estimate in estimates]).ravel()[order]
        places = np.tile(PLACES, rows)[order]
        depths = np.where(np.array([offer.forwards for offer in offers])[order // LIMIT], places, 0)
        start = np.zeros(1)
        tokens = rows + np.concatenate((start, worths[order].cumsum()))
        squares = np.concatenate((start, ((2 * places - 1) * worths[order]).cumsum()))
        steps = rows + np.concatenate((start, shares.cumsum()))
        deepest = np.concatenate(([0], np.maximum.accumulate(depths)))
        tokens, ms = self._until_the_last_row(offers, tokens, squares, steps, deepest)
        return Candidates(tokens, ms, lambda index: np.bincount(order[:index] // LIMIT, minlength=rows).tolist())

    def _common_lengths(self, offers: Sequence[Offer], usable: list[int]) -> Candidates:
        """Return one candidate per length 0, 1, 2, ...: every row drafts that many tokens, or as many as it can.

        Used if padding costs as much as tokens.
        """
        rows, places = len(offers), np.arange(max(usable) + 1)
        tokens, squares = np.full(len(places), float(rows)), np.zeros(len(places))
        for offer, most, weight in zip(offers, usable, _remaining_weights(offers), strict=True):
            chances, allowed = self._estimate_for(offer).accepted(offer.row), np.minimum(places, most)
            tokens += weight * np.concatenate(([0.0], chances.cumsum()))[allowed]
            squares += weight * np.concatenate(([0.0], ((2 * PLACES - 1) * chances).cumsum()))[allowed]
        deepest = places * any(offer.forwards and most > 0 for offer, most in zip(offers, usable, strict=True))
        tokens, ms = self._until_the_last_row(offers, tokens, squares, rows * (1.0 + places), deepest)
        return Candidates(tokens, ms, lambda index: [min(max(most, 0), index) for most in usable])

    def _until_the_last_row(
        self, offers: Sequence[Offer], tokens: Rates, squares: Rates, verified: Rates, deepest: Places
    ) -> tuple[Rates, Rates]:
        """Return each candidate's tokens at the pace of the row that finishes last, and its time.

        Args:
            offers: of the coming round.
            tokens: float64 [candidates], the weighted tokens of all rows.
            squares: float64 [candidates], the weighted expected square of the number of accepted drafts, summed
                over all rows. If c_i is the chance of i or more, the expected square is the sum of (2i - 1) c_i.
            verified: float64 [candidates], the tokens that the target verifies.
            deepest: int64 [candidates], the longest draft of any row.
        """
        rows, left = len(offers), 1 + max(offer.most for offer in offers)
        pace = tokens / rows
        # The time to read unread tokens is spread over the rounds that are left: fewer if the pace is faster.
        rounds = left / pace if not self._rounds else np.minimum(HORIZON, left / pace)
        forwards = np.concatenate(([0.0], self._forwards.chances().cumsum()))[deepest]
        drafting = (
            self.costs.draft_ms(rows, forwards, np.zeros(1)) + (deepest > 0) * self._reading_ms(offers) / rounds
        )
        variance = np.maximum(squares / rows - (pace - 1) ** 2, 0)
        ms = self.costs.verify_ms(rows, verified) + drafting
        return tokens * _last_row_share(rows, pace, variance, left), ms

    def _reading_ms(self, offers: Sequence[Offer]) -> float:
        """Return the time that the draft model needs to read its unread tokens."""
        return float(self.costs.draft_ms(len(offers), np.zeros(1), np.array([_unread(offers)]))[0])

    def _estimate_for(self, offer: Offer) -> AcceptanceEstimate:
        return self._estimates.setdefault(offer.source, AcceptanceEstimate(LIMIT, not offer.forwards))

    def observe(self, feedback: Feedback) -> None:
        """See LengthPolicy."""
        offers, rows, forwards = feedback.offers, len(feedback.offers), feedback.draft_forwards
        # Compute the plan that was made before this round. The allowance grows by a share of the round's time, and
        # shrinks by the plan's loss if the round followed the plan.
        plan = self.plan(offers)
        tried = plan.lost if feedback.lengths == plan.lengths else 0.0
        self._allowance += EXPLORE * self._ms(feedback) - tried
        skipped = self._skips_plan(offers)
        self._rounds, self._plain = self._rounds + 1, self._plain or not any(feedback.lengths)
        self._planned = None
        if any(plan.lengths) or plan.lost:
            # The plan drafts, or its plain round is only a trial, so don't skip the next planning.
            self._plain_until.clear()
        elif skipped:
            # While planning is skipped, don't observe plain rounds: their cost was observed a few rounds ago.
            return
        elif any(_sources(offers)):
            num_rounds = int(MAX_SKIP_MS / max(1e-3, self._ms(feedback)))
            self._plain_until[_sources(offers)] = self._rounds + min(MAX_SKIPPED_PLANS, num_rounds)
        drafted = list(zip(offers, feedback.lengths, feedback.drafted, feedback.accepted, strict=True))
        for source in {offer.source for offer, allowed, _, _ in drafted if allowed}:
            self._estimates[source].fade()
        for offer, allowed, count, accepted in drafted:
            if allowed:
                self._estimate_for(offer).add(offer.row, *(min(n, LIMIT) for n in (allowed, count, accepted)))
        deepest = max((allowed for offer, allowed, _, _ in drafted if offer.forwards), default=0)
        if deepest:
            self._forwards.fade()
            self._forwards.add(min(forwards, deepest, LIMIT), min(deepest, LIMIT))
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
        rows = len(feedback.offers)
        return float(self.costs.verify_ms(rows, np.array([float(rows)]))[0])


def _sources(offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return the source of each row's drafts, sorted, or "" for a row without an offer."""
    return tuple(sorted(offer.source if offer.most > 0 else "" for offer in offers))


def _remaining_weights(offers: Sequence[Offer]) -> Rates:
    """Return float64 [rows], the weight of one extra token in each row, smaller with fewer tokens left to write.

    The mean over the rows that offer drafts is 1. For the other rows, the number of remaining tokens is unknown.
    """
    left = np.array([max(offer.most, 0.0) for offer in offers])
    weights = (left / left.max()) ** REMAINING_EXPONENT
    return np.asarray(weights / weights[left > 0].mean())


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
