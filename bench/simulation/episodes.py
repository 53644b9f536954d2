"""`python -m bench episodes`: what `draft_length="auto"` wins and loses over whole texts, on a simulated clock.

An episode is one batch, from its first round to its last row. The clock's costs, the costs that the policy was
given, the acceptance and the noise are set, so an episode needs no model, and a seed always gives the same rounds.
Each cell compares mean times over episodes with those of regular decoding and of the best fixed length. The draft
reads the prompts during the prefill, as a draft head does, and the rest of the text in rounds that draft.

`MACHINES` are measured: step times by `draft_length="cost-aware"` (bass_core/decode/calibrate.py) on the CPU with
AMX, by `bench floor` without it (floor-without-amx.json), and by `bench gpu` on the H200
(gpu-nvidia-h200-2026-11-27.json). Wider steps than were measured there are extrapolated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from bass_core.draft.chain import HEADROOM
from bass_core.length.acceptance import PastDrafts
from bass_core.length.base import Feedback, LengthPolicy, Offer
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable
from bass_core.length.policies import FixedLength
from bass_core.predict.rounds import round_ms

from ..report.report import CPU, Row, at_least, document, parser, show, table

MACHINES = {
    "AMX": CostTable(
        {
            1: [(1, 11.3), (2, 11.6), (3, 11.9), (5, 12.8), (8, 13.5), (13, 14.8), (24, 18.2)],
            2: [(2, 12.0), (4, 12.7), (8, 13.8), (12, 15.1), (20, 17.1), (34, 21.6), (48, 24.8)],
            4: [(4, 13.9), (8, 15.1), (16, 16.9), (24, 19.0), (40, 23.2), (68, 36.1), (96, 43.1)],
            8: [(8, 16.5), (16, 18.8), (24, 20.1), (32, 21.6), (48, 27.5), (80, 39.5)],
            16: [(16, 21.5), (32, 27.5), (48, 33.5), (64, 40.0), (96, 53.0)],
        },
        {1: 0.25, 2: 0.25, 4: 0.26, 8: 0.35, 16: 0.6},
        padded=False,
        proposal={1: 1.3, 2: 1.5, 4: 1.9, 8: 2.4, 16: 3.4},
    ),
    "without AMX": CostTable(
        {
            1: [(1, 12.2), (2, 13.0), (3, 13.8), (4, 14.9), (8, 19.8), (24, 41.0)],
            2: [(2, 13.1), (6, 18.1), (24, 39.0)],
            4: [(4, 15.2), (8, 20.0), (12, 23.2), (16, 27.3), (24, 37.9)],
            8: [(8, 20.7), (16, 28.2), (32, 49.0)],
            16: [(16, 29.7), (24, 41.1), (48, 73.0)],
        },
        {1: 0.6, 2: 0.65, 4: 0.7, 8: 0.8, 16: 1.2},
        padded=False,
        proposal={1: 1.4, 2: 1.5, 4: 1.6, 8: 1.7, 16: 2.4},
    ),
    "H200": CostTable(
        {
            1: [(1, 0.86), (4, 1.15)],
            2: [(2, 1.18), (8, 1.30)],
            4: [(4, 1.19), (16, 1.40)],
            8: [(8, 1.22), (32, 2.10)],
            16: [(16, 1.70), (64, 2.20)],
        },
        {1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1, 16: 0.1},
        padded=True,
        proposal={1: 0.25, 2: 0.25, 4: 0.27, 8: 0.3, 16: 0.3},
    ),
}
# Milliseconds in which the draft reads one token, per millisecond of one of its forwards; by CostTable.padded.
READING = {False: 0.2, True: 0.01}
# A draft head stops before a token whose chance, times that of its drafts before it, is less; never on a GPU.
STOPS = {False: 0.1, True: 0.0}
# Standard deviation of the logarithm of a round's time, and the share of the rounds that take twice their time.
NOISE, HICCUPS = 0.03, 0.02
FIXED = (1, 2, 3, 5)
EPISODES = {1: 8, 4: 4, 8: 3, 16: 2}


@dataclass(frozen=True)
class Text:
    """How often a row's drafts are accepted while it is written.

    Attributes:
        name: for the table.
        rate: returns the acceptance of row r at a share (0 to 1) of its text.
    """

    name: str
    rate: Callable[[int, float], float]


def _constant(rate: float) -> Text:
    return Text(f"{rate:g}", lambda row, at: rate)


TEXTS = (
    *map(_constant, (0.2, 0.35, 0.45, 0.6, 0.8)),
    Text("0.3 to 0.8 by row", lambda row, at: 0.3 + 0.5 * ((row * 5) % 8) / 7),
    Text("0.8, then 0.3", lambda row, at: 0.8 if at < 0.5 else 0.3),
    Text("0.3, then 0.8", lambda row, at: 0.3 if at < 0.5 else 0.8),
    Text("0.4 with bursts of 0.95", lambda row, at: 0.95 if (at * 5 + row / 3) % 1 < 0.25 else 0.4),
)


@dataclass(frozen=True)
class Cell:
    """What an episode happens in.

    Attributes:
        machine: a key of MACHINES, for the clock's costs.
        rows: the batch size.
        tokens: new tokens of each row.
        text: acceptance.
        table: a key of TABLES, for the costs that the policy was given.
    """

    machine: str
    rows: int
    tokens: int
    text: Text
    table: str = "as they are"

    @property
    def costs(self) -> CostTable:
        """The clock's costs."""
        return MACHINES[self.machine]

    def policy(self, past: PastDrafts | None = None) -> CostAware:
        """Return the policy that "auto" stands for; `past` as for CostAware."""
        plain, wide = TABLES[self.table]
        verify = {
            rows: [(points[0][0], min(points[0][1] * plain, points[1][1] * wide))]
            + [(x, y * wide) for x, y in points[1:]]
            for rows, points in self.costs.verify.items()
        }
        return CostAware(replace(self.costs, verify=verify), past=past)


# Factors of the times of plain and of wider steps, in the table that the policy is given.
TABLES = {"as they are": (1.0, 1.0), "plain steps slow": (1.4, 1.0), "wide steps slow": (1.0, 1.4)}
CELLS = [
    *(Cell(*each) for each in itertools.product(MACHINES, EPISODES, (64, 256), TEXTS)),
    *(
        Cell(*each)
        for each in itertools.product(MACHINES, (1, 4, 8), (256,), (TEXTS[0], TEXTS[3]), list(TABLES)[1:])
    ),
]


def main(argv: list[str]) -> None:
    """Play, print the worst cells, and write."""
    arguments = parser("episodes", __doc__ or "").parse_args(argv)
    cells = CELLS[:: 24 if arguments.quick else 1]
    results = [compare(cell, arguments.seed) for cell in cells]
    for key in ("over regular", "over best fixed"):
        print(f"\nThe worst {key}\n{table(sorted(results, key=lambda row: row[key])[:12])}")
    claims = [
        at_least(
            f"least time of regular / time of auto, {len(cells)} cells",
            min(row["over regular"] for row in results),
            0.97,
        ),
        at_least(
            "mean time of the best fixed length / time of auto",
            fmean(row["over best fixed"] for row in results),
            0.97,
        ),
    ]
    show(document("episodes", arguments, CPU, results, claims), arguments)


def compare(cell: Cell, seed: int = 0, past: PastDrafts | None = None) -> Row:
    """Return a cell's figures. `past`: the policies of all its episodes remember earlier drafts."""
    seeds = range(seed, seed + EPISODES[cell.rows])
    regular, *fixed = (fmean(play(cell, FixedLength(n), at) for at in seeds) for n in (0, *FIXED))
    auto = fmean(play(cell, cell.policy(past), at) for at in seeds)
    best = min(regular, *fixed)
    return {
        "machine": cell.machine, "batch": cell.rows, "tokens": cell.tokens, "acceptance": cell.text.name,
        "table": cell.table, "best fixed": regular / best, "over regular": regular / auto,
        "over best fixed": best / auto,
    }  # fmt: skip


def play(cell: Cell, policy: LengthPolicy, seed: int) -> float:
    """Return the milliseconds of an episode, from the first round to the last row's end."""
    rng, costs = np.random.default_rng(seed), cell.costs
    left, unread = [cell.tokens] * cell.rows, [1] * cell.rows
    live, clock = list(range(cell.rows)), 0.0
    while live:
        offers = [Offer(left[row] - 1, "head", True, unread[row], row) for row in live]
        asked = policy.lengths(offers)
        limits = [min(most, offer.most) for most, offer in zip(asked, offers, strict=True)]
        rates = [cell.text.rate(row, 1 - left[row] / cell.tokens) for row in live]
        drafts = [_draft(rng, rate, most, STOPS[costs.padded]) for rate, most in zip(rates, limits, strict=True)]
        drafted, accepted = [count for count, _ in drafts], [count for _, count in drafts]
        # A row that stops early has seen one more token than it drafts.
        forwards = max(min(most, count + 1) for most, count in zip(limits, drafted, strict=True))
        rows = len(live)
        slow = float(np.exp(rng.normal(0, NOISE))) * (2 if rng.random() < HICCUPS else 1)
        draft_ms, verify_ms = (slow * ms for ms in round_ms(costs, drafted, forwards))
        if forwards:
            draft_ms += slow * READING[costs.padded] * sum(unread[row] for row in live) * costs.draft_ms(rows)
        clock += draft_ms + verify_ms
        policy.observe(Feedback(offers, asked, drafted, accepted, forwards, draft_ms + verify_ms, draft_ms))
        for row, count in zip(live, accepted, strict=True):
            unread[row] = (0 if forwards else unread[row]) + count + 1
            left[row] -= count + 1
        live = [row for row in live if left[row]]
    return clock


def _draft(rng: np.random.Generator, rate: float, most: int, stops: float) -> tuple[int, int]:
    """Return how many tokens a row drafts and how many are accepted; the draft knows each token's chance."""
    chance, drafted, accepted, matches = 1.0, 0, 0, True
    while drafted < most and chance >= HEADROOM * stops:
        token = rng.beta(1.5 * rate, 1.5 * (1 - rate))
        if chance * token < stops:
            break
        chance *= token
        drafted += 1
        matches &= rng.random() < token
        accepted += matches
    return drafted, accepted
