"""Checks of the simulation against exact values: claims that no timing noise can disturb.

Contract: seeded; a simulated mean must be within four standard errors of its exact value. Standard errors come
from means over blocks of rounds, since a policy makes neighbouring rounds alike.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bass_core.length.base import LengthPolicy
from bass_core.length.costs import CostTable
from bass_core.length.options import BASS, make_policy
from bass_core.predict.rounds import Acceptance, rounds

from ..report.report import claim
from .closed_form import algorithm_1, speedup, tokens_per_round

BLOCKS = 40
ERRORS = 4.0
DRAFT_COST = 0.1  # a draft step's time, in target steps
Row = dict[str, Any]


def run(seed: int, quick: bool) -> tuple[list[Row], list[Any]]:
    """Check fixed lengths against the formulas, and Algorithm 1 against its Markov chain."""
    count = 2000 if quick else 20000
    fixed, speed, chain = [], [], []
    for rate, length in itertools.product((0.6, 0.8, 0.9), (1, 4, 7)):
        found = _means(make_policy(length), rate, 8, count, seed)
        fixed.append(_row(f"l = {length}, tokens a round", rate, 8, found[1], tokens_per_round(rate, length)))
        speed.append(_row(f"l = {length}, speed-up", rate, 8, found[2], speedup(rate, length, DRAFT_COST)))
    for rate, rows in itertools.product((0.7, 0.8, 0.9), (1, 8)):
        found, exact = _means(make_policy(BASS), rate, rows, count, seed), algorithm_1(rate, rows)
        for values, value, what in zip(found[:2], exact, ("draft length", "tokens a round"), strict=True):
            chain.append(_row(f"Algorithm 1, {what}", rate, rows, values, value))
    return [*fixed, *speed, *chain], [
        _claim("fixed lengths that meet (1 - a^(l+1)) / (1 - a)", fixed),
        _claim(f"fixed lengths that meet Leviathan's speed-up at c = {DRAFT_COST}", speed),
        _claim("Algorithm 1's means that meet its Markov chain", chain),
    ]


def _means(budget: LengthPolicy, rate: float, rows: int, count: int, seed: int) -> list[np.ndarray]:
    """Block means over rounds of endless rows: draft length, tokens per row and round, speed-up."""
    costs = CostTable({1: [(1.0, 1.0)]}, {1: DRAFT_COST}, padded=True)
    played = rounds(budget, Acceptance.same(rate), rows, None, np.random.default_rng(seed))
    some = itertools.islice(played, count)
    seen = np.array([(one.asked, 1 + sum(one.accepted) / rows, one.ms(costs)) for one in some])
    lengths, tokens, times = seen.reshape(BLOCKS, -1, 3).mean(axis=1).T
    return [lengths, tokens, tokens / times]


def _row(what: str, rate: float, rows: int, found: np.ndarray, exact: float) -> Row:
    error = float(found.std(ddof=1) / np.sqrt(len(found)))
    mean = float(found.mean())
    return {
        "kind": "check",
        "section": "checks",
        "what": what,
        "a": rate,
        "batch": rows,
        "simulated": mean,
        "exact": exact,
        "errors off": abs(mean - exact) / error if error else 0.0 if mean == exact else float("inf"),
    }


def _claim(name: str, rows: list[Row]) -> dict[str, Any]:
    met = sum(row["errors off"] <= ERRORS for row in rows)
    return claim(name, met, f"{len(rows)} of {len(rows)}, within {ERRORS:.0f} standard errors", met == len(rows))
