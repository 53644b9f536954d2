"""Predicts a batch size and a draft length that were held out of the measurements, on this machine.

Contract: every repeat measures the cost table of all batch sizes but the held-out one, then runs every arm;
medians over repeats, so a slow spell of the machine affects both sides. Acceptance comes from runs of the largest
batch at the fitting lengths. The held-out batch's predictions use no measurement of that batch, those of the
held-out length none of that length, those of Algorithm 1 none of Algorithm 1. Greedy, drafter "model".
`spread` is (highest - lowest) / median of an arm's repeats.
"clock": each arm once more on a simulated clock that goes by that table (SimulatedClock), so with the rounds that
it really has and their times predicted; without the acceptance, which the other predictions draw.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import numpy as np

from bass_core import Generation, ModelPair, SamplingParams, SimulatedClock, generate
from bass_core.decode.calibrate import measure_costs
from bass_core.draft.registry import choose_drafter
from bass_core.length.costs import CostTable, RoundCosts
from bass_core.length.options import make_policy
from bass_core.model.attention import choose_backend
from bass_core.predict.rounds import Acceptance, predict

from ..report.report import Row, claim, median

FIT, HELD_LENGTH = (2, 6), 4
WITHIN = 0.10
# Weight of the pooled rate in a row's own rate at a position, as a number of drafts (shrinkage).
POOLED = 4.0
WARM_UP = 4  # tokens of the unmeasured runs
# What is compared with the measured figure, and where a row has how far it is off.
KEYS = (("predicted", "off"), ("simulated clock's", "clock off"))
REGULAR, ALGORITHM_1 = "regular", "Algorithm 1"


def run(pair: ModelPair, prompts: list[Any], arguments: Namespace) -> tuple[list[Row], list[Row]]:
    """Measure, predict, compare; returns rows and claims."""
    same: dict[str, Any] = {"drafter": "model", "eos_token_id": None, "seed": arguments.seed}
    same["max_new_tokens"] = arguments.max_new_tokens
    largest = max(arguments.batch)
    fitted = {length: generate(pair, prompts[:largest], draft_length=length, **same) for length in FIT}
    acceptance = measured_acceptance(fitted)
    lengths: dict[str, Any] = {REGULAR: 0, f"fixed {HELD_LENGTH}": HELD_LENGTH, ALGORITHM_1: "bass"}
    runs: dict[tuple[int, str], list[Generation]] = {
        (rows, arm): [] for rows in arguments.batch for arm in lengths
    }
    tables = []
    _round(pair, prompts, runs, lengths, same | {"max_new_tokens": WARM_UP})
    for repeat in range(arguments.repeats):
        print(f"measuring, repeat {repeat + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
        tables.append(_table(pair, [rows for rows in arguments.batch if rows != arguments.held_out]))
        for key, one in _round(pair, prompts, runs, lengths, same).items():
            runs[key].append(one)
    table = median_table(tables)
    clocked = _round(pair, prompts, runs, lengths, same | {"clock": SimulatedClock(table)})
    compared = [
        compare(table, acceptance, rows, arm, lengths[arm], found, arguments) | on_clock(found, clocked[rows, arm])
        for (rows, arm), found in runs.items()
    ]
    held = [row for row in compared if row["held out"]]
    claims = [_claim(row, arguments.quick, *key) for key in KEYS for row in held]
    return compared, claims


def _round(
    pair: ModelPair, prompts: list[Any], arms: Iterable[tuple[int, str]], lengths: dict[str, Any], same: Row
) -> dict[tuple[int, str], Generation]:
    """Run every arm once."""
    ways = {arm: {"method": REGULAR} if arm == REGULAR else {"draft_length": lengths[arm]} for arm in lengths}
    return {(rows, arm): generate(pair, prompts[:rows], **ways[arm], **same) for rows, arm in arms}


def _table(pair: ModelPair, sizes: list[int]) -> CostTable:
    backend = choose_backend("auto", pair.device)
    return measure_costs(pair, choose_drafter(pair, "model"), backend, SamplingParams(), sizes)


def median_table(tables: list[CostTable]) -> CostTable:
    """The median of the tables, point by point."""
    first = tables[0]
    verify = {
        rows: [(x, median([one.verify[rows][i][1] for one in tables])) for i, (x, _) in enumerate(points)]
        for rows, points in first.verify.items()
    }
    draft = {rows: median([one.draft[rows] for one in tables]) for rows in first.draft}
    return CostTable(verify, draft, first.padded)


def measured_acceptance(fitted: dict[int, Generation]) -> Acceptance:
    """Each row's acceptance rate by position, shrunk towards the rate of all rows at that position.

    A row's rounds are read from the tokens' origins: a round of length l ends with the target's own token, "bonus"
    after l accepted drafts and "recovered" after fewer. Rounds that the end cut short are left out.
    """
    rows, positions = len(next(iter(fitted.values())).sequences), max(fitted)
    tested, stood = np.zeros((rows, positions)), np.zeros((rows, positions))
    for length, made in fitted.items():
        for row, sequence in enumerate(made.sequences):
            for count in accepted_counts(sequence.origins, length):
                tested[row, : min(count + 1, length)] += 1
                stood[row, :count] += 1
    pool = (stood.sum(axis=0) + 1) / (tested.sum(axis=0) + 2)
    return Acceptance((stood + POOLED * pool) / (tested + POOLED))


def accepted_counts(origins: list[str], length: int) -> list[int]:
    """The number of accepted drafts in each uncut round of a row that drafts `length` tokens."""
    counts, run = [], 0
    for at, origin in enumerate(origins):
        if origin == "accepted":
            run += 1
            continue
        whole = len(origins) - (at - run) - 1 >= length
        if origin in ("recovered", "bonus") and whole:
            counts.append(run)
        run = 0
    return counts


def compare(
    costs: RoundCosts, acceptance: Acceptance, rows: int, arm: str, length: Any, runs: list[Generation],
    arguments: Namespace,
) -> Row:  # fmt: skip
    """One arm's measured and predicted figures."""
    trials = 4 if arguments.quick else 64
    tokens = arguments.max_new_tokens
    predicted = predict(costs, make_policy(length), acceptance, rows, tokens, arguments.seed, trials)
    times = [run.metrics.ms_per_token or 0.0 for run in runs]
    measured = median(times)
    return {
        "kind": "measured and predicted", "section": "validation", "batch": rows, "arm": arm,
        "held out": rows == arguments.held_out, "measured ms/token": measured,
        "spread": (max(times) - min(times)) / measured, "predicted ms/token": predicted.ms_per_token,
        "off": predicted.ms_per_token / measured - 1, "measured rounds": float(runs[-1].metrics.rounds),
        "predicted rounds": predicted.rounds,
    }  # fmt: skip


def on_clock(measured: list[Generation], clocked: Generation) -> Row:
    """The same arm's figures on the simulated clock, beside those of this machine's."""
    here = median([run.metrics.ms_per_token or 0.0 for run in measured])
    there = clocked.metrics.ms_per_token or 0.0
    return {"clock ms/token": there, "clock off": there / here - 1, "clock rounds": float(clocked.metrics.rounds)}


def _claim(row: Row, quick: bool, what: str, key: str) -> Row:
    bar = max(WITHIN, float(row["spread"]))
    name = f"{what} / measured ms per token - 1, batch {row['batch']} held out, {row['arm']}"
    return claim(name, row[key], f"within {bar:.2f}", None if quick else abs(row[key]) <= bar)
