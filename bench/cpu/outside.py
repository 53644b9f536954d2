"""`python -m bench outside`: the lane "transformers" against transformers' `generate` called as anyone would.

Contract: the same prompts, greedy, no early end; the model has its own dtype and attention. ms a token of four
arms, interleaved: `generate` alone, (a call with all tokens - a call with one) / (tokens - 1); the same in a
thread of its own, as the lane has one; the lane alone; the lane in a fair race beside regular decoding; the last
two on the lane's clock. `turn us`: an empty turn, handed over and back. Medians. The lane's text must be that of
`generate`.
On a CPU the thread itself can cost something: OpenMP gives each thread a team of its own, and where all teams
together have more threads than there are cores, it lets them sleep between two operations. With
OMP_WAIT_POLICY=PASSIVE, as app.py sets it, they always sleep, and the arms are alike.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bass_core import ModelPair, generate, load_pair, race
from bass_core.decode.outside.call import PAD, call_generate
from bass_core.decode.outside.turns import Turns
from bass_core.decode.request import make_request

from ..prompts import mixed
from ..report.report import claim, finish, median, parser

TURNS = 2000
# The most that taking turns may cost the lane, as a ratio; the scatter of a small shared machine is in it.
MOST = 1.05


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("outside", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options.add_argument("--max-new-tokens", type=int, default=48)
    options.add_argument("--repeats", type=int, default=7)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.max_new_tokens, arguments.repeats = min(arguments.max_new_tokens, 8), 2
    pair = load_pair(arguments.pair, device="cpu", dtype=arguments.dtype)
    results: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    for batch in arguments.batch:
        prompts = mixed(batch)
        alone, apart, lane, raced = _measure(pair, prompts, arguments.max_new_tokens, arguments.repeats)
        results.append(
            {
                "batch": batch,
                "waiting": os.environ.get("OMP_WAIT_POLICY", "default"),
                "generate ms": median(alone),
                "in a thread ms": median(apart),
                "lane ms": median(lane),
                "lane in a race ms": median(raced),
                "turn us": _turn_us(),
            }
        )
        for name, own in (("lane", lane), ("lane in a race", raced)):
            for against, theirs in (("generate", alone), ("generate in a thread", apart)):
                ratio = median([one / two for one, two in zip(own, theirs, strict=True)])
                holds = None if arguments.quick else ratio <= MOST
                claims.append(claim(f"{name} / {against}, batch {batch}", ratio, f"at most {MOST}", holds))
        other = _different(pair, prompts, arguments.max_new_tokens)
        claims.append(claim(f"texts that differ, batch {batch}", other, "0", other == 0))
    finish("outside", arguments, pair.device, results, claims)


def _measure(pair: ModelPair, prompts: list[str], tokens: int, repeats: int) -> tuple[list[float], ...]:
    """ms a token of the four arms, repeat by repeat behind an uncounted one."""
    rows = make_request(pair, prompts).prompts
    same: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None}
    call = partial(call_generate, pair.target, rows, do_sample=False, pad_token_id=PAD)
    times: list[tuple[float, ...]] = []
    for _ in range(repeats + 1):
        calls = [partial(call, max_new_tokens=n, min_new_tokens=n) for n in (1, tokens)]
        prompt, whole = map(_seconds, calls)
        apart, all_apart = (_seconds(partial(_in_a_thread, one)) for one in calls)
        lane = generate(pair, prompts, method="transformers", **same)
        *_, last = race(pair, prompts, lanes=("regular", "transformers"), **same)
        raced = last["lanes"]["transformers"]["metrics"]["ms_per_token"]
        assert lane.metrics.ms_per_token is not None and raced is not None
        mine = (1000 * one / (tokens - 1) for one in (whole - prompt, all_apart - apart))
        times.append((*mine, lane.metrics.ms_per_token, raced))
    return tuple(map(list, zip(*times[1:], strict=True)))


def _different(pair: ModelPair, prompts: list[str], tokens: int) -> int:
    """How many rows of the lane differ from what `generate` writes."""
    rows = make_request(pair, prompts).prompts
    options = {"do_sample": False, "pad_token_id": PAD, "min_new_tokens": tokens, "max_new_tokens": tokens}
    theirs = call_generate(pair.target, rows, **options)[:, max(map(len, rows)) :].tolist()
    lane = generate(pair, prompts, method="transformers", max_new_tokens=tokens, eos_token_id=None)
    return sum(one.token_ids != other for one, other in zip(lane.sequences, theirs, strict=True))


def _seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _in_a_thread(action: Callable[[], Any]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def _turn_us() -> float:
    """Microseconds of a turn in which nothing is done."""

    def work(hand_over: Any) -> None:
        while hand_over(0):
            pass

    turns: Turns[int] = Turns(work, torch.device("cpu"), "bench-turns")
    turns.take()
    spent = [1e6 * _seconds(turns.take) for _ in range(TURNS)]
    turns.stop()
    return median(spent)
