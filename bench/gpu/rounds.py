"""What a round on a GPU consists of: kernels, the gaps between them, and the host.

A pair of SmolLM2-135M's shape and a head of one layer, with random weights. For regular decoding and BASS at each
batch size: the lane's clock and the wall time per round, if each round is launched before the last one is read,
and if not; the round's graphs replayed alone, timed by events; the sum of their kernels' times; the same graphs
replayed in a row without a read, which no host that runs ahead can beat; and the wall time next to a thread busy
with Python, by the interpreter's switch interval.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bass_core import ModelPair
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.model.static_step import CapturedStep

from ..report.report import median
from .context import Context
from .speed import milliseconds

METHODS: dict[str, dict[str, Any]] = {"regular": {}, "bass": {"draft_length": 3}}
# Seconds: Python's default, and one shorter than a round.
SWITCH_INTERVALS = (0.005, 0.0002)
FIRST = 4


def rounds(ctx: Context) -> None:
    """Split the rounds of both methods at batch 1, 8 and 32."""
    pair = ctx.pair_with_head()
    for size in (2,) if ctx.tiny else (1, 8) if ctx.quick else (1, 8, 32):
        for method in METHODS:
            _split(ctx, pair, method, size)


def _split(ctx: Context, pair: ModelPair, method: str, size: int) -> None:
    case, count = f"b{size} {method}", 3 if ctx.tiny else 30
    lane = _begun(ctx, pair, method, size)
    _time(ctx, lane, f"{case}, launched ahead", count)
    for interval in SWITCH_INTERVALS:
        with _busy_thread(interval):
            times = [_wall_ms(lane.step) for _ in range(count)]
        ctx.row(case, f"wall next to a busy thread, switch interval {1000 * interval:g} ms", median(times), "ms")
    lane.end("stopped")
    # Graphs of rounds launched ahead lengthen the rows at each replay, so replay those of other rounds.
    with mock.patch.object(BatchDecoder, "launches_ahead", False):
        lane = _begun(ctx, pair, method, size)
    clock = _time(ctx, lane, case, count)
    with _replayed_steps() as steps:
        lane.step()
    ctx.row(case, "graphs", float(len(steps)), "replays per round")

    def replay(times: int = 1) -> None:
        for _ in range(times):
            for step in steps:
                step.replay()

    alone, kernels = milliseconds(replay, ctx.device), _kernels_ms(ctx, replay)
    ctx.row(case, "graphs alone", alone, "ms")
    ctx.row(case, "kernels", kernels, "ms")
    ctx.row(case, "gaps", alone - kernels, "ms")
    ctx.row(case, "host", clock - alone, "ms")
    many = 3 if ctx.tiny else 200
    unread = milliseconds(partial(replay, many), ctx.device, repeats=3) / many
    ctx.row(case, "graphs in a row, without a read", unread, "ms per round")
    lane.end("stopped")


def _time(ctx: Context, lane: Lane, case: str, count: int) -> float:
    """Report the times of `count` rounds, and return the clock's milliseconds of one."""
    before, began = lane.decode_ms, time.perf_counter()
    for _ in range(count):
        lane.step()
    clock = (lane.decode_ms - before) / count
    ctx.row(case, "clock", clock, "ms per round")
    ctx.row(case, "wall", 1000 * (time.perf_counter() - began) / count, "ms per round")
    return clock


def _begun(ctx: Context, pair: ModelPair, method: str, size: int) -> Lane:
    """Return a lane after its prefill and its first rounds, with enough tokens left for all that is measured."""
    request = make_request(
        pair, ctx.prompts(size, 384, 512, pair.vocab), max_new_tokens=60 if ctx.tiny else 800,
        drafter="model", eos_token_id=None, **METHODS[method],
    )  # fmt: skip
    lane = Lane(pair, request, method)
    lane.prepare()
    while lane.step().kind == "prefill":
        pass
    for _ in range(FIRST):
        lane.step()
    return lane


def _wall_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


@contextmanager
def _busy_thread(interval: float) -> Iterator[None]:
    """Run a thread that computes in Python, as the page's server does in a race."""
    before, end = sys.getswitchinterval(), threading.Event()

    def compute() -> None:
        while not end.is_set():
            sum(range(200))

    thread = threading.Thread(target=compute, daemon=True)
    sys.setswitchinterval(interval)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        sys.setswitchinterval(before)


@contextmanager
def _replayed_steps() -> Iterator[list[CapturedStep]]:
    """Yield the list of captured steps whose numbers are filled in the block, in their order."""
    steps: list[CapturedStep] = []
    fill = CapturedStep.fill

    def noted(step: CapturedStep, *arguments: Any) -> None:
        steps.append(step)
        fill(step, *arguments)

    with mock.patch.object(CapturedStep, "fill", noted):
        yield steps


def _kernels_ms(ctx: Context, call: Callable[[], object]) -> float:
    """Return the sum of the times of a call's kernels."""
    cuda = ctx.device.type == "cuda"
    call()
    with profile(
        activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize(ctx.device)
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    return sum(float(getattr(row, spent)) for row in profiler.key_averages()) / 1000
