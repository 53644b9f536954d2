"""Exact values for the simulation: formulas from the papers, and Algorithm 1 as a Markov chain.

Contract: no random numbers; i.i.d. acceptance a, rows that never end.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from bass_core.length.policies import Algorithm1


def tokens_per_round(rate: float, length: int) -> float:
    """(1 - a^(l + 1)) / (1 - a): Leviathan et al. 2211.17192, equation 1; l + 1 for a = 1."""
    return length + 1.0 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)


def speedup(rate: float, length: int, cost: float) -> float:
    """Speed-up over plain steps if a draft step costs `cost` target steps: the same paper, theorem 3.8."""
    return tokens_per_round(rate, length) / (length * cost + 1)


def algorithm_1(rate: float, rows: int) -> tuple[float, float]:
    """Exact mean draft length, and tokens per row and round, under Algorithm 1.

    The policy's state (length, shrinking) depends only on the previous state and the best row's accepted count k,
    whose distribution function is (1 - a^(k + 1))^rows below the length: a Markov chain, solved for its stationary
    distribution.
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
    """The stationary distribution: the solution of share = share @ moves that sums to 1."""
    size = len(moves)
    system = np.vstack([moves.T - np.eye(size), np.ones(size)])
    right = np.append(np.zeros(size), 1.0)
    return np.linalg.lstsq(system, right, rcond=None)[0]
