"""Rounds played with a real draft-length policy: seeded, on given step times and a given acceptance.

Contract: a batch of rows does round after round what BatchDecoder does (bass_core/decoding/batch.py): a row drafts
min(asked, what it may still write - 1), keeps the accepted ones and one token of the target, and leaves when it
has written all; the policy is told as there. The same seed gives the same rounds.
Non-goals: prefills, drafters that propose fewer tokens than asked, early ends of text, a common stop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bass_core.budget.cost_table import RoundCosts
from bass_core.budget.policies import DraftLengthPolicy


@dataclass(frozen=True)
class Acceptance:
    """rates[r][i]: how often draft i of row r stands, given that those before it do; the last goes on for ever.

    Rows beyond the last start again at the first.
    """

    rates: NDArray[np.float64]

    @staticmethod
    def same(rate: float) -> Acceptance:
        """Every draft of every row stands with the same probability: the papers' i.i.d. acceptance."""
        return Acceptance(np.full((1, 1), rate))

    def draw(self, rng: np.random.Generator, rows: list[int], drafted: list[int]) -> list[int]:
        """How many drafts of each row stand."""
        width = max(drafted)
        if not width:
            return [0] * len(rows)
        where = np.minimum(np.arange(width), self.rates.shape[1] - 1)
        rates = self.rates[np.asarray(rows) % len(self.rates)][:, where]
        stand = np.logical_and.accumulate(rng.random((len(rows), width)) < rates, axis=1).sum(axis=1)
        return [int(count) for count in np.minimum(stand, drafted)]


@dataclass(frozen=True)
class Played:
    """A round: the length asked for, and of each row in `rows` what it drafted and what stood."""

    asked: int
    rows: list[int]
    drafted: list[int]
    accepted: list[int]

    def ms(self, costs: RoundCosts) -> float:
        """Its time: one verification, and a forward of the draft for each token of the longest draft."""
        count, widest = len(self.rows), max(self.drafted)
        tokens = count * (1 + widest) if costs.padded else count + sum(self.drafted)
        return costs.verify_ms(count, tokens) + widest * costs.draft_ms(count)


def rounds(
    policy: DraftLengthPolicy, acceptance: Acceptance, rows: int, tokens: int | None, rng: np.random.Generator
) -> Iterator[Played]:
    """The rounds of `rows` rows that write `tokens` tokens each behind the prefill's; without an end for None."""
    left = [1 << 60 if tokens is None else tokens] * rows
    live = list(range(rows)) if left[0] else []
    while live:
        asked = policy.length
        drafted = [min(asked, left[row] - 1) for row in live]
        accepted = acceptance.draw(rng, live, drafted)
        yield Played(asked, live, drafted, accepted)
        observe = getattr(policy, "observe", None)
        if observe is not None:
            observe(asked, drafted, accepted, max(drafted))
        if any(count == asked for count in drafted):
            policy.update(accepted)
        for row, count in zip(live, accepted, strict=True):
            left[row] -= count + 1
        live = [row for row in live if left[row]]


@dataclass(frozen=True)
class Prediction:
    """Means over runs. Times in ms and names as in bass_core/lanes/metrics.py; no prefill is simulated, so that
    throughput_tps is without it."""

    ms_per_token: float
    ptl_first_ms: float
    ptl_last_ms: float
    ptl_all_ms: float
    throughput_tps: float
    mean_acceptance_length: float
    draft_length: float
    rounds: float


def play(
    policy: DraftLengthPolicy, acceptance: Acceptance, rows: int, tokens: int, seed: int = 0, trials: int = 8
) -> list[list[Played]]:
    """`trials` whole runs, `rows` rows of `tokens` (2 or more) new tokens, the first of them the prefill's."""
    return [
        list(rounds(copy.deepcopy(policy), acceptance, rows, tokens - 1, np.random.default_rng((seed, trial))))
        for trial in range(trials)
    ]


def timed(costs: RoundCosts, runs: list[list[Played]], tokens: int) -> Prediction:
    """What the runs take on these step times."""
    means = np.mean([_figures(costs, played, tokens) for played in runs], axis=0)
    return Prediction(*(float(value) for value in means))


def predict(
    costs: RoundCosts,
    policy: DraftLengthPolicy,
    acceptance: Acceptance,
    rows: int,
    tokens: int,
    seed: int = 0,
    trials: int = 8,
) -> Prediction:
    """`play`, and what that takes."""
    return timed(costs, play(policy, acceptance, rows, tokens, seed, trials), tokens)


def _figures(costs: RoundCosts, played: list[Played], tokens: int) -> tuple[float, ...]:
    """The fields of a Prediction for one run."""
    rows, now = len(played[0].rows), 0.0
    ends: list[float] = []
    for one, left in zip(played, [len(other.rows) for other in played[1:]] + [0], strict=True):
        now += one.ms(costs)
        ends += [now] * (len(one.rows) - left)
    drafting = sum(count > 0 for one in played for count in one.drafted)
    accepted = sum(sum(one.accepted) for one in played)
    return (
        now / (tokens - 1),
        ends[0] / (tokens - 1),
        ends[-1] / (tokens - 1),
        sum(ends) / rows / (tokens - 1),
        1000 * rows * tokens / now,
        1 + accepted / max(1, drafting),
        sum(one.asked for one in played) / len(played),
        len(played),
    )
