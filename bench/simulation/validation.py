"""Predictions for a batch size and a draft length that were held out of the measurements here. Call `run`.

Every repeat measures the cost table of all batch sizes except the held-out one, then runs every arm. We use
medians over repeats, so slow moments of the machine affect both sides. Acceptance comes from runs of the largest
batch at the lengths in FIT. No prediction uses a measurement of what it predicts: neither of the held-out batch,
nor of the held-out length, nor of Algorithm 1. Decoding is greedy, and the drafter is "model". `spread` is
(highest - lowest) / median of an arm's repeats.

The "clock" figures come from running each arm again on a simulated clock with the same table (SimulatedClock).
In these figures only the times are predicted, while the rounds are real; the other predictions also draw the
acceptance at random.
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
# We estimate a row's acceptance rate at a position as if the row had tested this many additional drafts at that
# position, and as if they had been accepted at the mean rate of all rows. This keeps rates from few drafts close
# to that mean (shrinkage).
POOLED = 4.0
WARM_UP = 4  # tokens of the unmeasured runs
# The names of the predictions, and the columns with their relative errors.
KEYS = (("predicted", "off"), ("simulated clock's", "clock off"))
REGULAR, ALGORITHM_1 = "regular", "Algorithm 1"


def run(pair: ModelPair, prompts: list[Any], arguments: Namespace) -> tuple[list[Row], list[Row]]:
    """Measure, predict and compare; return rows and claims."""
    common: dict[str, Any] = {"drafter": "model", "eos_token_id": None, "seed": arguments.seed}
    common["max_new_tokens"] = arguments.max_new_tokens
    largest = max(arguments.batch)
    fitted = {length: generate(pair, prompts[:largest], draft_length=length, **common) for length in FIT}
    acceptance = measured_acceptance(fitted)
    lengths: dict[str, Any] = {REGULAR: 0, f"fixed {HELD_LENGTH}": HELD_LENGTH, ALGORITHM_1: "bass"}
    runs: dict[tuple[int, str], list[Generation]] = {
        (rows, arm): [] for rows in arguments.batch for arm in lengths
    }
    tables = []
    _round(pair, prompts, runs, lengths, common | {"max_new_tokens": WARM_UP})
    for repeat in range(arguments.repeats):
        print(f"measuring, repeat {repeat + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
        tables.append(_table(pair, [rows for rows in arguments.batch if rows != arguments.held_out]))
        for key, generation in _round(pair, prompts, runs, lengths, common).items():
            runs[key].append(generation)
    table = median_table(tables)
    clocked = _round(pair, prompts, runs, lengths, common | {"clock": SimulatedClock(table)})
    compared = [
        compare(table, acceptance, rows, arm, lengths[arm], outs, arguments) | on_clock(outs, clocked[rows, arm])
        for (rows, arm), outs in runs.items()
    ]
    held_out = [row for row in compared if row["held out"]]
    claims = [_claim(row, arguments.quick, *key) for key in KEYS for row in held_out]
    return compared, claims


def _round(
    pair: ModelPair, prompts: list[Any], arms: Iterable[tuple[int, str]], lengths: dict[str, Any], common: Row
) -> dict[tuple[int, str], Generation]:
    """Run every arm once."""
    options = {arm: {"method": REGULAR} if arm == REGULAR else {"draft_length": lengths[arm]} for arm in lengths}
    return {(rows, arm): generate(pair, prompts[:rows], **options[arm], **common) for rows, arm in arms}


def _table(pair: ModelPair, sizes: list[int]) -> CostTable:
    backend = choose_backend("auto", pair.device)
    return measure_costs(pair, choose_drafter(pair, "model"), backend, SamplingParams(), sizes)


def median_table(tables: list[CostTable]) -> CostTable:
    """Return the median of the tables, point by point."""
    first = tables[0]
    verify = {
        rows: [(x, median([each.verify[rows][i][1] for each in tables])) for i, (x, _) in enumerate(points)]
        for rows, points in first.verify.items()
    }
    draft = {rows: median([each.draft[rows] for each in tables]) for rows in first.draft}
    return CostTable(verify, draft, first.padded)


def measured_acceptance(fitted: dict[int, Generation]) -> Acceptance:
    """Return each row's acceptance rate by position, shrunk towards the rate of all rows at that position.

    We infer a row's rounds from the origins of its tokens. A round of length l ends with a token of the target:
    "bonus" after l accepted drafts, "recovered" after fewer. Rounds cut short by the end of the text are left out.
    """
    rows, positions = len(next(iter(fitted.values())).sequences), max(fitted)
    tested, accepted = np.zeros((rows, positions)), np.zeros((rows, positions))
    for length, generation in fitted.items():
        for row, sequence in enumerate(generation.sequences):
            for count in accepted_counts(sequence.origins, length):
                tested[row, : min(count + 1, length)] += 1
                accepted[row, :count] += 1
    pool = (accepted.sum(axis=0) + 1) / (tested.sum(axis=0) + 2)
    return Acceptance((accepted + POOLED * pool) / (tested + POOLED))


def accepted_counts(origins: list[str], length: int) -> list[int]:
    """Return the number of accepted drafts in each complete round of a row that drafts `length` tokens."""
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
    """Return one arm's measured and predicted figures."""
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
    """Return an arm's figures on the simulated clock, and their error compared with this machine's clock."""
    measured_ms = median([run.metrics.ms_per_token or 0.0 for run in measured])
    simulated_ms = clocked.metrics.ms_per_token or 0.0
    return {
        "clock ms/token": simulated_ms,
        "clock off": simulated_ms / measured_ms - 1,
        "clock rounds": float(clocked.metrics.rounds),
    }


def _claim(row: Row, quick: bool, prediction: str, key: str) -> Row:
    bar = max(WITHIN, float(row["spread"]))
    name = f"{prediction} / measured ms per token - 1, batch {row['batch']} held out, {row['arm']}"
    return claim(name, row[key], f"within {bar:.2f}", None if quick else abs(row[key]) <= bar)
