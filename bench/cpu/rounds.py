"""`python -m bench rounds`: where the time of a BASS round goes, part by part.

Every part is timed on its own, without the parts inside it, in rounds in which all rows draft. Batches,
temperatures and lengths take turns. A figure is the mean of a part's lowest quarter of times, because other
programs can only add time. "outside" is the sum of all parts except the target's compiled forward and the head's
compiled chain; "with chain" includes the chain.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from bass_core import ModelPair, SamplingParams
from bass_core.decode import verifier
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.draft.head.chain import HeadDrafter
from bass_core.lanes.lane import Lane
from bass_core.verify import judge

from ..prompts import CHAT, varied
from ..report.report import Row, at_most, finish, load, parser, whole

TARGET, CHAIN = "target", "chain"
PARTS = (
    CHAIN, "head inputs", "propose", TARGET, "around target", "judge", "commit", "round", "lane",
)  # fmt: skip
# The bars for the time outside the forwards, by rows.
BARS = {4: 1.5, 8: 2.0}


class Parts:
    """Times calls, each without the timed calls inside it."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """Return the call, timed as the part name(*arguments)."""

        def run(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                taken = 1000 * (time.perf_counter() - start)
                self.ms[name(*arguments)] += taken - self._inner.pop()
                self._inner[-1] += taken

        return run


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("rounds", __doc__ or "", "pair", "draft", "dtype")
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--length", type=whole(), nargs="+", default=[3])
    options.add_argument("--max-new-tokens", type=whole(2), default=48)
    options.add_argument("--repeats", type=whole(), default=4)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens, arguments.repeats = [1, 4], 12, 1
    pair = load(arguments, device="cpu")
    cases = [
        (rows, temperature, length)
        for rows in arguments.batch
        for temperature in (0.0, 0.7)
        for length in arguments.length
    ]
    rounds: dict[tuple[int, float, int], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats + 1):
        for case in cases:
            measured = list(_rounds(pair, *case, arguments.max_new_tokens, arguments.seed + repeat))
            rounds[case] += measured if repeat else []
    results = [_row(*case, rounds[case]) for case in cases]
    claims = [
        at_most(
            f"outside forwards, {row['rows']} rows, temperature {row['temperature']}, ms",
            row["outside"],
            BARS[row["rows"]],
            not arguments.quick,
        )
        for row in results
        if row["rows"] in BARS
    ]
    finish("rounds", arguments, pair, results, claims)


def _rounds(
    pair: ModelPair, rows: int, temperature: float, length: int, tokens: int, seed: int
) -> Iterator[dict[str, float]]:
    """Yield the milliseconds of each part in each round in which all rows draft `length` tokens."""
    sampling = SamplingParams(temperature, top_p=0.95) if temperature else SamplingParams()
    request = make_request(
        pair, varied(CHAT, rows), max_new_tokens=tokens, eos_token_id=None, draft_length=length,
        sampling=sampling, seed=seed,
    )  # fmt: skip
    lane, parts = Lane(pair, request, "bass"), Parts()
    with _timed(parts):
        while not lane.finished:
            parts.ms.clear()
            round_ = lane.step()
            if round_.kind == "verify" and len(round_.rows) == rows and min(round_.lengths) == length:
                yield dict(parts.ms)


@contextmanager
def _timed(parts: Parts) -> Iterator[None]:
    """Time the parts of a round inside this block."""
    from kernels.cpu.calls import pool  # imports numba

    def kernel(function: Any, phases: int, *arguments: Any) -> str:
        if function.__name__ != "forward":
            return "head inputs"
        return CHAIN if len(arguments[-1].columns) else TARGET

    places: list[tuple[Any, str, Any]] = [
        (pool, "run", kernel),
        (HeadDrafter, "propose", "propose"),
        (verifier.Verifier, "feed", "around target"),
        (BatchDecoder, "_commit", "commit"),
        (BatchDecoder, "_round", "round"),
        (verifier, "shaped", "judge"),
        (judge, "verify", "judge"),
        (Lane, "step", "lane"),
    ]
    with ExitStack() as stack:
        for owner, name, part in places:
            label = part if callable(part) else (lambda *_, part=part: part)
            stack.enter_context(mock.patch.object(owner, name, parts.timed(getattr(owner, name), label)))
        yield


def _row(rows: int, temperature: float, length: int, rounds: list[dict[str, float]]) -> Row:
    quarter = max(1, len(rounds) // 4)
    by_part = {part: sum(sorted(ms.get(part, 0.0) for ms in rounds)[:quarter]) / quarter for part in PARTS}
    total = sum(by_part.values())
    return {
        "rows": rows, "temperature": temperature, "length": length, "rounds": len(rounds), "ms": total, **by_part,
        "with chain": total - by_part[TARGET], "outside": total - by_part[TARGET] - by_part[CHAIN],
    }  # fmt: skip
