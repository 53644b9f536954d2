"""Rounds simulated with a real draft-length policy, for given step times and acceptance: `predict`.

Every round does the same as BatchDecoder (bass_core/decode/batch.py): a row drafts min(asked, tokens left - 1),
keeps the accepted drafts and one token of the target, and leaves the batch once it has all its tokens. The policy
gets the same calls as from BatchDecoder. The same seed gives the same rounds.
Not simulated: prefills, drafters that propose fewer tokens than asked, early ends of text, a common stop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..length.base import Feedback, LengthPolicy, Offer
from ..length.costs import RoundCosts
from ..length.policies import FixedLength


@dataclass(frozen=True)
class Acceptance:
    """Probabilities of acceptance.

    Attributes:
        rates: rates[r][i] is the probability that draft i of row r is accepted if the drafts before it are. The
            last rate holds for all later drafts. If there are more rows than lists, the lists repeat: for example,
            with two lists, row 2 uses that of row 0.
    """

    rates: NDArray[np.float64]

    @staticmethod
    def same(rate: float) -> Acceptance:
        """Return an Acceptance with the same rate for every draft of every row, as the papers assume (i.i.d.)."""
        return Acceptance(np.full((1, 1), rate))

    def draw(self, rng: np.random.Generator, rows: list[int], drafted: list[int]) -> list[int]:
        """Draw the number of accepted drafts of each row."""
        width = max(drafted)
        if not width:
            return [0] * len(rows)
        columns = np.minimum(np.arange(width), self.rates.shape[1] - 1)
        rates = self.rates[np.asarray(rows) % len(self.rates)][:, columns]
        accepted = np.logical_and.accumulate(rng.random((len(rows), width)) < rates, axis=1).sum(axis=1)
        return [int(count) for count in np.minimum(accepted, drafted)]


def round_ms(costs: RoundCosts, drafted: list[int], forwards: float) -> tuple[float, float]:
    """Return the ms of a proposal with `forwards` draft forwards, and of verifying drafted[r] drafts in row r."""
    rows = len(drafted)
    tokens = rows * (1 + max(drafted)) if costs.padded else rows + sum(drafted)
    proposal = forwards * costs.draft_ms(rows) + costs.proposal_ms(rows) if forwards else 0.0
    return proposal, costs.verify_ms(rows, tokens)


@dataclass(frozen=True)
class Played:
    """A simulated round: the longest draft length, and each row's drafted and accepted tokens."""

    asked: int
    rows: list[int]
    drafted: list[int]
    accepted: list[int]

    def ms(self, costs: RoundCosts) -> float:
        """Return the round's time: one verification, and a draft forward per token of the longest draft."""
        return sum(round_ms(costs, self.drafted, max(self.drafted)))


def rounds(
    policy: LengthPolicy, acceptance: Acceptance, rows: int, tokens: int | None, rng: np.random.Generator
) -> Iterator[Played]:
    """Simulate rounds of `rows` rows, which write `tokens` tokens each after the prefill (None: without end)."""
    left = [1 << 60 if tokens is None else tokens] * rows
    live = list(range(rows)) if left[0] else []
    while live:
        offers = [Offer(left[row] - 1, row=row) for row in live]
        asked = policy.lengths(offers)
        drafted = [min(most, offer.most) for most, offer in zip(asked, offers, strict=True)]
        accepted = acceptance.draw(rng, live, drafted)
        yield Played(max(asked), live, drafted, accepted)
        policy.observe(Feedback(offers, asked, drafted, accepted, max(drafted), math.nan, math.nan))
        for row, count in zip(live, accepted, strict=True):
            left[row] -= count + 1
        live = [row for row in live if left[row]]


@dataclass(frozen=True)
class Prediction:
    """Means over the simulated runs. Times are in ms, and the fields are named as in bass_core/lanes/metrics.py.

    No prefill is simulated, so throughput_tps excludes it.
    """

    ms_per_token: float
    ptl_first_ms: float
    ptl_last_ms: float
    ptl_all_ms: float
    throughput_tps: float
    mean_acceptance_length: float
    draft_length: float
    rounds: float


def play(
    policy: LengthPolicy, acceptance: Acceptance, rows: int, tokens: int, seed: int = 0, trials: int = 8
) -> list[list[Played]]:
    """Simulate `trials` runs of `rows` rows. The prefill writes the first of the `tokens` (2 or more) tokens."""
    return [
        list(rounds(copy.deepcopy(policy), acceptance, rows, tokens - 1, np.random.default_rng((seed, trial))))
        for trial in range(trials)
    ]


def timed(costs: RoundCosts, runs: list[list[Played]], tokens: int) -> Prediction:
    """Return the mean times of the runs with these step times."""
    means = np.mean([_figures(costs, played, tokens) for played in runs], axis=0)
    return Prediction(*(float(value) for value in means))


def predict(
    costs: RoundCosts,
    policy: LengthPolicy,
    acceptance: Acceptance,
    rows: int,
    tokens: int,
    seed: int = 0,
    trials: int = 8,
) -> Prediction:
    """Simulate runs with `play` and return their times from `timed`."""
    return timed(costs, play(policy, acceptance, rows, tokens, seed, trials), tokens)


def mean_steps(
    costs: RoundCosts, acceptance: Sequence[float], readers: Sequence[int], drafts: int, tokens: int, trials: int
) -> list[list[float]]:
    """Return BASS's mean step for each number of rows: [tokens written, ms], over the rounds of whole texts.

    Args:
        acceptance: the probability of each row; with fewer entries than rows they repeat.
        drafts: draft tokens per row.
        tokens: new tokens per row.
        trials: simulated runs.
    """
    chances, steps = Acceptance(np.array([[rate] for rate in acceptance])), []
    for rows in readers:
        run = predict(costs, FixedLength(drafts), chances, rows, tokens, trials=trials)
        steps.append([rows * (tokens - 1) / run.rounds, run.ms_per_token * (tokens - 1) / run.rounds])
    return steps


def _figures(costs: RoundCosts, played: list[Played], tokens: int) -> tuple[float, ...]:
    """Return the fields of a Prediction for one run."""
    rows, elapsed_ms = len(played[0].rows), 0.0
    ends: list[float] = []
    for round_, rows_after in zip(played, [len(following.rows) for following in played[1:]] + [0], strict=True):
        elapsed_ms += round_.ms(costs)
        ends += [elapsed_ms] * (len(round_.rows) - rows_after)
    drafting = sum(count > 0 for round_ in played for count in round_.drafted)
    accepted = sum(sum(round_.accepted) for round_ in played)
    return (
        elapsed_ms / (tokens - 1),
        ends[0] / (tokens - 1),
        ends[-1] / (tokens - 1),
        sum(ends) / rows / (tokens - 1),
        1000 * rows * tokens / elapsed_ms,
        1 + accepted / max(1, drafting),
        sum(round_.asked for round_ in played) / len(played),
        len(played),
    )
