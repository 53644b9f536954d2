"""What trees under the planner predict for the 7.8B pair on a GPU, by batch, and where they turn.

Contract: rows for the bench's tables. "predicted": a roofline's step times and rounds played with the real
policies, beside Algorithm 1, the cost-aware chain and regular decoding on the same costs. "measured and
predicted": the model of acceptance beside what the shipped head was measured to write, which no clock decides.
Speed is that of rows of equal length, prefills left out. A row's padding up to the widest row costs what tokens
cost, as in a forward on a GPU; "padding free" are the same rounds where it costs nothing, as in our CPU's.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np

from bass_core.budget.cost_aware import CostAware
from bass_core.budget.planner import Planner
from bass_core.budget.policies import Algorithm1, FixedLength
from bass_core.budget.trees import FixedNodes
from bass_core.prediction.hardware import HARDWARE, Assumptions
from bass_core.prediction.roofline import Roofline
from bass_core.prediction.rounds import Acceptance, predict, timed
from bass_core.prediction.shapes import shapes

from ...report.report import claim
from ..sweeps import BATCHES, crossover
from .rounds import Chances, PlayedTrees, play_trees, tree_rounds

GPUS = ("A100", "H100")
# Tokens a row and round of the shipped head, greedy, 16 prompts, head alone: by batch and drafts in all rows.
HEAD = {
    1: {1: 1.52, 2: 1.79, 4: 2.09, 8: 2.30, 16: 2.57},
    4: {2: 1.37, 4: 1.62, 8: 1.94, 16: 2.27},
    8: {2: 1.21, 4: 1.39, 8: 1.64, 16: 1.95},
}
# Its chains' acceptance behind 0, 1, ... drafts, from the same measurement; the last is few drafts' and rounded.
HEAD_RATES = (0.52, 0.44, 0.44, 0.3)
HEAD_BAR, LEAST = 0.12, 1.0
# Below so many drafts a row-round drafting counts as over; below this share of other candidates trees do.
FEW, CHAINS = 0.5, 0.05
Row = dict[str, Any]


def run(arguments: Namespace, assumed: Assumptions) -> tuple[list[Row], list[Any]]:
    """The head's table, the sweep over batches, and where it turns; with their claims."""
    head, swept = _head_rows(arguments), sweep(arguments, assumed)
    off = max(abs(row["off"]) for row in head)
    claims = [_claim("simulated trees against the head's measured ones, furthest off", off, HEAD_BAR, arguments)]
    least = min(row["budget / Algorithm 1"] for row in swept)
    holds = None if arguments.quick else least >= LEAST
    claims.append(claim("budget / Algorithm 1, least of all batches", least, f"at least {LEAST:g}", holds))
    return [*head, *swept, *turns(swept)], claims


def sweep(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """Tokens a second of the four ways to decode, by GPU and batch."""
    made = []
    for name in GPUS:
        costs = Roofline(HARDWARE[name], *shapes("7.8B"), arguments.context, assumed=assumed)
        for rows in (1, 16) if arguments.quick else BATCHES:
            head = {"kind": "predicted", "section": "trees", "hardware": name, "batch": rows}
            made.append(head | figures(costs, arguments.acceptance, rows, arguments.seed, arguments.quick))
    return made


def figures(costs: Roofline, rate: float, rows: int, seed: int, quick: bool) -> Row:
    """Tokens a second, and what the planner's rounds looked like."""
    tokens = 24 if quick else 96
    trials = 1 if quick else max(1, min(4, 16 // rows))
    coins = Acceptance.same(rate)
    plain, bass, aware = (
        predict(costs, policy, coins, rows, tokens, seed, max(4, trials)).throughput_tps
        for policy in (FixedLength(0), Algorithm1(), CostAware(costs, rows))
    )
    runs = play_trees(Planner(costs, rows), Chances((rate,)), rows, tokens, seed, trials)
    budget, free = (
        timed(one, [list(run) for run in runs], tokens).throughput_tps
        for one in (costs, replace(costs, padded=False))
    )
    return {
        "regular tokens/s": plain,
        "Algorithm 1 tokens/s": bass,
        "cost-aware tokens/s": aware,
        "budget tokens/s": budget,
        "padding free tokens/s": free,
        "budget / regular": budget / plain,
        "budget / Algorithm 1": budget / bass,
        "budget / cost-aware": budget / aware,
    } | _shape([one for run in runs for one in run if len(one.rows) == rows])


def _shape(played: list[PlayedTrees]) -> Row:
    """What the rounds drafted while all rows were there."""
    row_rounds, drafted = sum(len(one.rows) for one in played), sum(sum(one.drafted) for one in played)
    return {
        "drafts a row-round": drafted / row_rounds,
        "depth": sum(one.asked for one in played) / len(played),
        "levels": sum(one.levels for one in played) / len(played),
        "other candidates": sum(one.seconds for one in played) / max(drafted, 1),
        "plain rounds": sum(not max(one.drafted) for one in played) / len(played),
        "tokens a row-round": 1 + sum(sum(one.accepted) for one in played) / row_rounds,
    }


def turns(rows: list[Row]) -> list[Row]:
    """By GPU, the batch where Algorithm 1 and the planner fall below others; None: nowhere."""
    made = []
    for name in dict.fromkeys(row["hardware"] for row in rows):
        mine = [row for row in rows if row["hardware"] == name]

        def below(key: str, bar: float, mine: list[Row] = mine) -> float | None:
            return crossover([(row["batch"], row[key] / bar) for row in mine])

        for row in mine:
            row["Algorithm 1 / regular"] = row["Algorithm 1 tokens/s"] / row["regular tokens/s"]
        made.append(
            {
                "kind": "predicted",
                "section": "trees turn",
                "hardware": name,
                "Algorithm 1 below regular": below("Algorithm 1 / regular", 1.0),
                "budget below regular": below("budget / regular", 1.0),
                "budget below Algorithm 1": below("budget / Algorithm 1", 1.0),
                "budget below cost-aware": below("budget / cost-aware", 1.0),
                "trees become chains": below("other candidates", CHAINS),
                "drafting ends": below("drafts a row-round", FEW),
            }
        )
    return made


def _head_rows(arguments: Namespace) -> list[Row]:
    """The shipped head's measured tokens a row and round beside those of the model of acceptance."""
    made = []
    for batch, by_nodes in HEAD.items():
        for nodes, measured in list(by_nodes.items())[:: 3 if arguments.quick else 1]:
            rng = np.random.default_rng(arguments.seed)
            played = tree_rounds(FixedNodes(nodes), Chances(HEAD_RATES), batch, None, rng)
            some = itertools.islice(played, (60 if arguments.quick else 800) // batch)
            simulated = 1 + float(np.mean([sum(one.accepted) / batch for one in some]))
            head = {"kind": "measured and predicted", "section": "tree acceptance", "batch": batch}
            made.append(
                head
                | {
                    "drafts": nodes,
                    "measured": measured,
                    "simulated": simulated,
                    "off": simulated / measured - 1,
                }
            )
    return made


def _claim(name: str, off: float, bar: float, arguments: Namespace) -> dict[str, Any]:
    return claim(name, off, f"at most {bar:g}", None if arguments.quick else off <= bar)
