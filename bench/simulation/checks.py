"""Checks of the simulation against exact values, without any timing. Call `run`.

Exact values come from the papers' formulas, and from Algorithm 1 as a Markov chain, for i.i.d. acceptance a and
rows that never end. The simulation is seeded, and each mean must be within four standard errors of its exact
value. We compute standard errors from means over blocks of rounds, because a policy makes neighbouring rounds
similar.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bass_core.length.base import LengthPolicy
from bass_core.length.costs import CostTable
from bass_core.length.options import BASS, make_policy
from bass_core.length.policies import Algorithm1
from bass_core.predict.rounds import Acceptance, rounds

from ..report.report import Row, claim

BLOCKS = 40
ERRORS = 4.0
DRAFT_COST = 0.1  # the time of a draft step, in target steps


def run(seed: int, quick: bool) -> tuple[list[Row], list[Any]]:
    """Check fixed lengths against the formulas, and Algorithm 1 against its Markov chain."""
    count = 2000 if quick else 20000
    fixed, speed, chain = [], [], []
    for rate, length in itertools.product((0.6, 0.8, 0.9), (1, 4, 7)):
        means = _means(make_policy(length), rate, 8, count, seed)
        fixed.append(_row(f"l = {length}, tokens a round", rate, 8, means[1], tokens_per_round(rate, length)))
        speed.append(_row(f"l = {length}, speed-up", rate, 8, means[2], speedup(rate, length, DRAFT_COST)))
    for rate, rows in itertools.product((0.7, 0.8, 0.9), (1, 8)):
        means, exact = _means(make_policy(BASS), rate, rows, count, seed), algorithm_1(rate, rows)
        for values, value, name in zip(means[:2], exact, ("draft length", "tokens a round"), strict=True):
            chain.append(_row(f"Algorithm 1, {name}", rate, rows, values, value))
    return [*fixed, *speed, *chain], [
        _claim("fixed lengths that meet (1 - a^(l+1)) / (1 - a)", fixed),
        _claim(f"fixed lengths that meet Leviathan's speed-up at c = {DRAFT_COST}", speed),
        _claim("Algorithm 1's means that meet its Markov chain", chain),
    ]


def _means(policy: LengthPolicy, rate: float, rows: int, count: int, seed: int) -> list[np.ndarray]:
    """Return block means over rounds of endless rows: draft length, tokens per row-round, speed-up."""
    costs = CostTable({1: [(1.0, 1.0)]}, {1: DRAFT_COST}, padded=True)
    played = rounds(policy, Acceptance.same(rate), rows, None, np.random.default_rng(seed))
    some = itertools.islice(played, count)
    seen = np.array([(each.asked, 1 + sum(each.accepted) / rows, each.ms(costs)) for each in some])
    lengths, tokens, times = seen.reshape(BLOCKS, -1, 3).mean(axis=1).T
    return [lengths, tokens, tokens / times]


def _row(quantity: str, rate: float, rows: int, means: np.ndarray, exact: float) -> Row:
    error = float(means.std(ddof=1) / np.sqrt(len(means)))
    mean = float(means.mean())
    off = abs(mean - exact) / error if error else 0.0 if mean == exact else float("inf")
    return {
        "kind": "check", "section": "checks", "what": quantity, "a": rate, "batch": rows, "simulated": mean,
        "exact": exact, "errors off": off,
    }  # fmt: skip


def _claim(name: str, rows: list[Row]) -> Row:
    met = sum(row["errors off"] <= ERRORS for row in rows)
    return claim(name, met, f"{len(rows)} of {len(rows)}, within {ERRORS:.0f} standard errors", met == len(rows))


def tokens_per_round(rate: float, length: int) -> float:
    """Return (1 - a^(l + 1)) / (1 - a), or l + 1 for a = 1 (Leviathan et al. 2211.17192, equation 1)."""
    return length + 1.0 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)


def speedup(rate: float, length: int, cost: float) -> float:
    """Return the speed-up over plain steps if a draft step costs `cost` target steps (same paper, theorem 3.8)."""
    return tokens_per_round(rate, length) / (length * cost + 1)


def algorithm_1(rate: float, rows: int) -> tuple[float, float]:
    """Return the exact mean draft length, and tokens per row-round, under Algorithm 1.

    The policy's state (length, shrinking) depends only on the previous state and the best row's accepted count k.
    For k below the draft length, the probability that the best row accepts at most k drafts is
    (1 - a^(k + 1))^rows. So the states are a Markov chain, which we solve for its stationary distribution.
    """
    limit = Algorithm1.limit
    states = list(itertools.product(range(1, limit + 1), (0, 1)))
    number = {state: index for index, state in enumerate(states)}
    moves = np.zeros((len(states), len(states)))
    for state, index in number.items():
        below = 0.0
        for best in range(state[0] + 1):
            upto = 1.0 if best == state[0] else (1 - rate ** (best + 1)) ** rows
            policy = Algorithm1(length=state[0], shrinking=state[1])
            policy.update(best)
            moves[index, number[policy.length, policy.shrinking]] += upto - below
            below = upto
    share = _stationary(moves)
    lengths = np.array([length for length, _ in states])
    tokens = np.array([tokens_per_round(rate, length) for length, _ in states])
    return float(share @ lengths), float(share @ tokens)


def _stationary(moves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the stationary distribution: the solution of share = share @ moves that sums to 1."""
    size = len(moves)
    system = np.vstack([moves.T - np.eye(size), np.ones(size)])
    right = np.append(np.zeros(size), 1.0)
    return np.linalg.lstsq(system, right, rcond=None)[0]
