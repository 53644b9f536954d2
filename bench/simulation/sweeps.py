"""Predicted speed-ups beyond this machine, over batch sizes and long contexts.

All rows are of kind "predicted": they come from datasheet numbers and assumptions. The speed-up is regular
decoding's ms per token over the policy's, both predicted with the same step times.
"""

from __future__ import annotations

import itertools
import math
from argparse import Namespace

from bass_core.draft.window import WINDOW
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import RoundCosts
from bass_core.length.options import BASS, make_policy
from bass_core.predict.hardware import HARDWARE, Assumptions
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Acceptance, predict, round_ms
from bass_core.predict.shapes import shapes

from ..report.report import Row
from .checks import tokens_per_round

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONG = (32768, 65536, 131072)
LONGEST_FIXED = 16
POLICIES = ("Algorithm 1", "cost-aware", "best fixed")


def figures(
    costs: RoundCosts, acceptance: Acceptance, rate: float, rows: int, tokens: int, seed: int, trials: int
) -> Row:
    """Predict the ms per token of regular decoding and of Algorithm 1, and the speed-ups of three policies.

    Args:
        acceptance: the acceptance of the simulated rounds.
        rate: the i.i.d. acceptance for which we choose the fixed length.
        rows: the batch size.
        tokens: new tokens per row.
        trials: simulated runs per policy.
    """
    length = best_fixed(costs, rate, rows)
    regular = predict(costs, make_policy(0), acceptance, rows, tokens, seed, trials=1)
    bass, fixed, aware = (
        predict(costs, budget, acceptance, rows, tokens, seed, trials)
        for budget in (make_policy(BASS), make_policy(length), CostAware(costs, timed=False))
    )
    return {
        "regular ms/token": regular.ms_per_token,
        "bass ms/token": bass.ms_per_token,
        "PTL All": bass.ptl_all_ms,
        "tokens/s": bass.throughput_tps,
        "l": bass.draft_length,
        "Algorithm 1": regular.ms_per_token / bass.ms_per_token,
        "cost-aware": regular.ms_per_token / aware.ms_per_token,
        "best fixed": regular.ms_per_token / fixed.ms_per_token,
        "fixed l": length,
    }


def best_fixed(costs: RoundCosts, rate: float, rows: int) -> int:
    """Return the fixed length from 0 to 16 with the most tokens per ms, by formula, for endless i.i.d. rows."""

    def speed(length: int) -> float:
        return tokens_per_round(rate, length) / sum(round_ms(costs, [length] * rows, length))

    return max(range(LONGEST_FIXED + 1), key=speed)


def crossover(points: list[tuple[int, float]]) -> float | None:
    """Return the batch size at which the speed-up falls below 1, interpolated in log2; None if it never does."""
    if points[0][1] < 1:
        return float(points[0][0])
    for (left, above), (right, below) in itertools.pairwise(points):
        if above >= 1 > below:
            part = (above - 1) / (above - below)
            return float(2 ** (math.log2(left) + part * (math.log2(right) - math.log2(left))))
    return None


def crossovers(rows: list[Row]) -> list[Row]:
    """Return for each GPU the batch sizes from which on the policies are slower than regular decoding."""
    results = []
    for name in dict.fromkeys(row["hardware"] for row in rows):
        mine = [row for row in rows if row["hardware"] == name]
        ends = {policy: crossover([(row["batch"], row[policy]) for row in mine]) for policy in POLICIES}
        results.append({"kind": "predicted", "section": "crossover", "hardware": name} | ends)
    return results


def batches(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """Predict the 7.8B pair on one GPU of each kind."""
    results, rate = [], arguments.acceptance
    tokens, trials = (48, 1) if arguments.quick else (256, 4)
    for hardware in HARDWARE.values():
        costs = Roofline(hardware, *shapes("7.8B"), arguments.context, assumed=assumed)
        for rows in (1, 8, 64) if arguments.quick else BATCHES:
            predicted = figures(costs, Acceptance.same(rate), rate, rows, tokens, arguments.seed, trials)
            results.append(_head("batch", hardware.name, rows, arguments.context) | predicted)
    return results


def windows(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """Predict the 7.8B target at long contexts with its windowed drafts and with the 310M draft.

    Each drafter uses its best length, and both have the same assumed acceptance. "break-even" is the lowest
    acceptance at which windowed drafts are faster than regular decoding. Figures are None if the models do not fit
    in memory.
    """
    results, rate = [], arguments.acceptance
    contexts = LONG[:1] if arguments.quick else LONG
    for hardware, context, rows in itertools.product(HARDWARE.values(), contexts, (1, 8)):
        small = Roofline(hardware, *shapes("7.8B"), context, assumed=assumed)
        windowed = small.windowed(WINDOW)
        row: Row = {**_head("window", hardware.name, rows, context), "window": WINDOW}
        for name, costs in (("310M", small), ("window", windowed)):
            length = best_fixed(costs, rate, rows)
            row[f"{name} l"] = length if costs.fits(rows) else None
            row[name] = speed_up(costs, rate, rows, length) if costs.fits(rows) else None
        row["window / 310M"] = row["window"] / row["310M"] if row["window"] and row["310M"] else None
        row["break-even"] = _break_even(windowed, rows) if windowed.fits(rows) else None
        results.append(row)
    return results


def speed_up(costs: Roofline, rate: float, rows: int, length: int) -> float:
    """Return the speed-up of rounds of a fixed length over regular decoding, by formula, for endless rows."""
    ms = sum(round_ms(costs, [length] * rows, length))
    return tokens_per_round(rate, length) * costs.verify_ms(rows, rows) / ms


def _break_even(costs: Roofline, rows: int) -> float | None:
    """Return the lowest acceptance, in steps of 0.01, at which some length pays; None if there is none below 1."""
    rates = (percent / 100 for percent in range(1, 100))
    return next((rate for rate in rates if best_fixed(costs, rate, rows) > 0), None)


def _head(section: str, hardware: str, rows: int, context: int) -> Row:
    return {"kind": "predicted", "section": section, "hardware": hardware, "batch": rows, "context": context}
