"""`python -m bench block`: how many drafts block verification accepts, and how many the rejection rule would.

Contract: the pair's draft drafts a fixed number of tokens behind texts that the target samples, and both rules
judge the same drafts: from the stored p, q and h the expected number of accepted drafts follows without a coin, so
that no noise of the test is in it. `more` is block / rejection; `error` is the standard error of the difference a
round. Rounds that the end of a text cut short are left out. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from statistics import mean, stdev
from typing import Any

from bass_core import ModelPair, SamplingParams, load_pair, stream
from bass_core.sequence import RowRound

from ..prompts import mixed
from ..report.report import claim, finish, parser

LENGTHS, TEMPERATURES = (2, 4, 8), (0.7, 1.0)


def main(argv: list[str]) -> None:
    """Draft, judge by both rules, print, and write."""
    options = parser("block", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--max-new-tokens", type=int, default=96)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens = 2, 16
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    results = [_row(pair, temperature, length, arguments) for temperature in TEMPERATURES for length in LENGTHS]
    claims = [
        claim(
            f"block over rejection, temperature {row['temperature']}, {row['length']} drafts", row["more"], "1.0",
            None if arguments.quick else row["more"] >= 1,
        )
        for row in results
    ]  # fmt: skip
    finish("block", arguments, pair.device, results, claims)


def _row(pair: ModelPair, temperature: float, length: int, arguments: Any) -> dict[str, Any]:
    both = [(_together(row), _one_by_one(row)) for row in _rounds(pair, temperature, length, arguments)]
    together, alone = (mean(numbers) for numbers in zip(*both, strict=True))
    spread = stdev(block - rejection for block, rejection in both)
    return {
        "temperature": temperature,
        "length": length,
        "row-rounds": len(both),
        "rejection": alone,
        "block": together,
        "more": together / alone,
        "error": spread / sqrt(len(both)),
    }


def _rounds(pair: ModelPair, temperature: float, length: int, arguments: Any) -> Iterator[RowRound]:
    """What `length` drafts a round did to each row."""
    rounds = stream(
        pair, mixed(arguments.batch), drafter="model", draft_length=length, verification="block",
        sampling=SamplingParams(temperature), max_new_tokens=arguments.max_new_tokens, seed=arguments.seed,
    )  # fmt: skip
    for round_ in rounds:
        yield from (row for row in round_.rows if len(row.drafted) == length)


def _together(row: RowRound) -> float:
    """The expected largest i with u_i < h_i."""
    expected, behind = 0.0, 1.0
    for i, chance in reversed(list(enumerate(row.chance, start=1))):
        expected += i * behind * chance
        behind *= 1 - chance
    return expected


def _one_by_one(row: RowRound) -> float:
    """The expected number of drafts before the first with u_i >= p_i / q_i."""
    expected, before = 0.0, 1.0
    for p, q in zip(row.p, row.q, strict=True):
        before *= min(1.0, p / q)
        expected += before
    return expected
