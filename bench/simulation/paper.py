"""The acceptance that the paper's figures imply (BASS, arXiv 2404.15778, abstract): prediction in reverse.

Contract: one A100, the 7.8B and 310M shapes, batch 8, Algorithm 1, i.i.d. acceptance a. Solved for a twice: so
that the predicted mean per-token latency is 5.8 ms, and so that the predicted speed-up over regular decoding is
2.15. Each is solved for every combination of the assumed efficiencies. 5.8 ms x 2.15 means regular decoding at
12.5 ms; at the share of bandwidth where it takes that long, both answers agree.
Assumed besides the efficiencies: bfloat16, 80 GB SXM, the shapes, the context, 256 new tokens a row, rows alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bass_core.length.costs import RoundCosts
from bass_core.length.options import BASS, make_policy
from bass_core.predict.hardware import HARDWARE, Assumptions
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Acceptance, Played, Prediction, play, predict, timed
from bass_core.predict.shapes import shapes

ROWS, TOKENS = 8, 256
LATENCY_MS, SPEEDUP, THROUGHPUT = 5.8, 2.15, 1100.0
BANDWIDTHS, COMPUTES, CONTEXTS = (0.5, 0.6, 0.7, 0.8, 0.9), (0.4, 0.6, 0.8), (256, 2048)
# Two acceptances at most this far apart agree.
SAME = 0.02
_GRID = 100  # simulated acceptances: multiples of 1/100
Row = dict[str, Any]


@dataclass
class Solver:
    """Rounds under Algorithm 1 at each acceptance: simulated once, then timed on any hardware."""

    seed: int
    trials: int
    _played: dict[int, list[list[Played]]] = field(default_factory=dict)

    def at(self, costs: RoundCosts, hundredths: int) -> Prediction:
        """The prediction for an acceptance of `hundredths` / 100."""
        if hundredths not in self._played:
            acceptance = Acceptance.same(hundredths / _GRID)
            self._played[hundredths] = play(make_policy(BASS), acceptance, ROWS, TOKENS, self.seed, self.trials)
        return timed(costs, self._played[hundredths], TOKENS)

    def solve(self, costs: RoundCosts, latency_ms: float) -> tuple[float, Prediction] | None:
        """The acceptance that gives a mean per-token latency of latency_ms, by bisection; None above 0.99."""
        low, high = 0, _GRID - 1
        if self.at(costs, high).ptl_all_ms > latency_ms:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.at(costs, middle).ptl_all_ms <= latency_ms else (middle, high)
        slow, fast = self.at(costs, low).ptl_all_ms, self.at(costs, high)
        part = (slow - latency_ms) / (slow - fast.ptl_all_ms) if slow > latency_ms else 0.0
        return (low + part) / _GRID, fast


def implied(costs: Roofline, solver: Solver) -> Row:
    """A row: the acceptance that each of the paper's two figures implies with these step times."""
    regular = predict(costs, make_policy(0), Acceptance.same(0), ROWS, TOKENS, trials=1).ptl_all_ms
    by_latency, by_speedup = (solver.solve(costs, ms) for ms in (LATENCY_MS, regular / SPEEDUP))
    agree = by_latency is not None and by_speedup is not None and abs(by_latency[0] - by_speedup[0]) <= SAME
    return {
        "kind": "predicted",
        "section": "paper",
        "bandwidth": costs.assumed.bandwidth,
        "compute": costs.assumed.compute,
        "context": costs.context,
        "regular ms/token": regular,
        "a for 5.8 ms": by_latency and by_latency[0],
        "a for 2.15x": by_speedup and by_speedup[0],
        "agree": agree,
        "tokens/s at 5.8 ms": by_latency and by_latency[1].throughput_tps,
    }


def run(assumed: Assumptions, context: int, seed: int, quick: bool) -> tuple[list[Row], str]:
    """The rows, and sentences that sum them up."""
    base = Roofline(HARDWARE["A100"], *shapes("7.8B"), context, assumed=assumed)
    share = agreeing_bandwidth(base)
    cases = [(assumed.bandwidth, assumed.compute, context)]
    if not quick:
        cases = [(b, c, context) for b in BANDWIDTHS for c in COMPUTES]
        cases += [(assumed.bandwidth, assumed.compute, other) for other in CONTEXTS]
    cases += [] if share is None else [(share, assumed.compute, context)]
    solver = Solver(seed, trials=1 if quick else 24)
    rows = [
        implied(replace(base, context=at, assumed=replace(assumed, bandwidth=b, compute=c)), solver)
        for b, c, at in cases
    ]
    return rows, _words(rows, None if share is None else rows[-1])


def agreeing_bandwidth(costs: Roofline) -> float | None:
    """The share of bandwidth, from 0.1 to 1, at which a step of regular decoding takes 5.8 ms x 2.15."""

    def slow(share: float) -> bool:
        slower = replace(costs, assumed=replace(costs.assumed, bandwidth=share))
        return slower.verify_ms(ROWS, ROWS) >= LATENCY_MS * SPEEDUP

    low, high = 0.1, 1.0
    if slow(high) or not slow(low):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slow(middle) else (low, middle)
    return low


def _words(rows: list[Row], met: Row | None) -> str:
    def span(head: str) -> str:
        found = [row[head] for row in rows if row[head] is not None]
        return f"{min(found):.2f} to {max(found):.2f}" if found else "more than 0.99"

    said = (
        f"Predicted: the paper's 5.8 ms/token implies a = {span('a for 5.8 ms')}, "
        f"its 2.15x a = {span('a for 2.15x')}, over the assumptions of the rows. "
    )
    if met is None or not met["agree"]:
        return said + "They agree at no share of the datasheet's bandwidth."
    return said + (
        f"They agree where a step reaches {met['bandwidth']:.0%} of the datasheet's bandwidth, so that regular "
        f"decoding takes {met['regular ms/token']:.2f} ms: a = {met['a for 5.8 ms']:.2f}, at a predicted "
        f"{met['tokens/s at 5.8 ms']:.0f} tokens/s. The paper's {THROUGHPUT:.0f} tokens/s and its 5.8 ms are two "
        f"measurements: 8 rows at 5.8 ms would be {1000 * ROWS / LATENCY_MS:.0f}."
    )
