"""Predicted speed-ups beyond this machine, over batch sizes and long contexts.

Contract: rows for the bench's tables, all of kind "predicted": they come from datasheet numbers and assumptions.
Speed-up is regular decoding's ms per token over the policy's, both predicted with the same step times.
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
from bass_core.predict.rounds import Acceptance, predict
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
    """ms per token of regular decoding and of Algorithm 1, and the speed-ups of three policies.

    rate: the i.i.d. acceptance for which the fixed length is chosen.
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
    """The fixed length from 0 to 16 with the most tokens per ms, by formula, for i.i.d. rows that never end."""

    def speed(length: int) -> float:
        round_ms = costs.verify_ms(rows, rows * (length + 1)) + length * costs.draft_ms(rows)
        return tokens_per_round(rate, length) / round_ms

    return max(range(LONGEST_FIXED + 1), key=speed)


def crossover(points: list[tuple[int, float]]) -> float | None:
    """The batch size at which speed-up falls below 1, interpolated in log2; None where it never does."""
    if points[0][1] < 1:
        return float(points[0][0])
    for (left, above), (right, below) in itertools.pairwise(points):
        if above >= 1 > below:
            part = (above - 1) / (above - below)
            return float(2 ** (math.log2(left) + part * (math.log2(right) - math.log2(left))))
    return None


def crossovers(rows: list[Row]) -> list[Row]:
    """The batch size where each policy stops paying, from the rows of `batches`."""
    made = []
    for name in dict.fromkeys(row["hardware"] for row in rows):
        mine = [row for row in rows if row["hardware"] == name]
        ends = {policy: crossover([(row["batch"], row[policy]) for row in mine]) for policy in POLICIES}
        made.append({"kind": "predicted", "section": "crossover", "hardware": name} | ends)
    return made


def batches(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """The 7.8B pair on one GPU of each kind."""
    made, rate = [], arguments.acceptance
    tokens, trials = (48, 1) if arguments.quick else (256, 4)
    for hardware in HARDWARE.values():
        costs = Roofline(hardware, *shapes("7.8B"), arguments.context, assumed=assumed)
        for rows in (1, 8, 64) if arguments.quick else BATCHES:
            found = figures(costs, Acceptance.same(rate), rate, rows, tokens, arguments.seed, trials)
            made.append(_head("batch", hardware.name, rows, arguments.context) | found)
    return made


def windows(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """The 7.8B target at long contexts: its own windowed drafts beside the 310M draft's, each at its best length.

    Both are accepted with the same assumed probability. break-even: the acceptance from which on the windowed
    drafts are faster than regular decoding. None where it does not fit in memory.
    """
    made, rate = [], arguments.acceptance
    contexts = LONG[:1] if arguments.quick else LONG
    for hardware, context, rows in itertools.product(HARDWARE.values(), contexts, (1, 8)):
        small = Roofline(hardware, *shapes("7.8B"), context, assumed=assumed)
        own = small.windowed(WINDOW)
        row: Row = {**_head("window", hardware.name, rows, context), "window": WINDOW}
        for name, costs in (("310M", small), ("window", own)):
            length = best_fixed(costs, rate, rows)
            row[f"{name} l"] = length if costs.fits(rows) else None
            row[name] = _speed_up(costs, rate, rows, length) if costs.fits(rows) else None
        row["window / 310M"] = row["window"] / row["310M"] if row["window"] and row["310M"] else None
        row["break-even"] = _break_even(own, rows) if own.fits(rows) else None
        made.append(row)
    return made


def _speed_up(costs: Roofline, rate: float, rows: int, length: int) -> float:
    """Regular decoding's ms a token over those of rounds of a fixed length, by formula, rows that never end."""
    round_ms = costs.verify_ms(rows, rows * (length + 1)) + length * costs.draft_ms(rows)
    return tokens_per_round(rate, length) * costs.verify_ms(rows, rows) / round_ms


def _break_even(costs: Roofline, rows: int) -> float | None:
    """The least acceptance, in hundredths, at which some length pays; None: not below 1."""
    rates = (percent / 100 for percent in range(1, 100))
    return next((rate for rate in rates if best_fixed(costs, rate, rows) > 0), None)


def _head(section: str, hardware: str, rows: int, context: int) -> Row:
    return {"kind": "predicted", "section": section, "hardware": hardware, "batch": rows, "context": context}
