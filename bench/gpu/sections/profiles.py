"""The time of a step and of a round, kernel by kernel, and the cost of capturing them.

Contract: torch.profiler's table of a captured step and of BASS rounds (kernel, microseconds, count), the share of
the time in which no kernel ran, and each capture's seconds and megabytes. In a dry run the "kernels" are torch's
operators on the CPU. Profiled times show where the time goes; they are not the speed without the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bass_core.decoding.request import make_request
from bass_core.engine.cuda_graphs import release_idle
from bass_core.lanes.lane import Lane
from bass_core.models.forward import ForwardBatch
from kernels.support import runtime

from ..context import Context

MOST_KERNELS = 16


def run(ctx: Context) -> None:
    """Profile captures, a step, and rounds."""
    captures(ctx)
    if not ctx.late:
        step(ctx)
    for temperature in (0.0, 0.8):
        if not ctx.late:
            rounds(ctx, temperature)


@torch.inference_mode()
def captures(ctx: Context) -> None:
    """What capturing costs: a shape's first step against its second, in seconds and reserved memory."""
    for name, model in (("target", ctx.pair.target_step), ("draft", ctx.pair.draft_step)):
        assert model is not None
        runner = ctx.runner(model, 8, 64)
        for batch, width in ((8, 1),) if ctx.dry else ((8, 1), (8, 5), (8, 6), (4, 5), (1, 1)):
            ids = torch.zeros(batch, width, dtype=torch.long, device=ctx.device)
            before, started = _reserved(ctx), time.perf_counter()
            runner.forward(ForwardBatch(ids, [16] * batch))
            _wait(ctx)
            case = f"capture of {name}, b{batch} x {width}"
            ctx.row(case, "seconds", time.perf_counter() - started, "s")
            ctx.row(case, "memory", (_reserved(ctx) - before) / 2**20, "MB")
        del runner
        release_idle(model)


@torch.inference_mode()
def step(ctx: Context) -> None:
    """Replays of a decoding step at batch 8."""
    batch, kv = (2, 16) if ctx.dry else (8, 512)
    runner = ctx.runner(ctx.pair.target_step, batch, kv + 1)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=ctx.device)
    table(ctx, f"step b{batch} kv{kv}", lambda: runner.forward(ForwardBatch(ids, [kv] * batch)).logits, times=5)


def rounds(ctx: Context, temperature: float) -> None:
    """BASS rounds at batch 8 with five drafts each."""
    from bass_core import SamplingParams

    batch = 2 if ctx.dry else 8
    request = make_request(
        ctx.pair, ctx.prompts(batch), max_new_tokens=64, draft_length=5, drafter="model", eos_token_id=None,
        attention=ctx.backend, synthetic_acceptance=None if temperature else 0.8,
        sampling=SamplingParams(temperature),
    )  # fmt: skip
    lane = Lane(ctx.pair, request, "bass")
    for _ in range(4):
        lane.step()
    table(ctx, f"round b{batch} l=5 temperature {temperature}", lane.step, times=3)
    lane.end("stopped")


def table(ctx: Context, case: str, call: Callable[[], Any], times: int) -> None:
    """What ran in `times` calls; figures are per call."""
    kind = ProfilerActivity.CPU if ctx.dry else ProfilerActivity.CUDA
    call()
    _wait(ctx)
    with profile(activities=[kind], acc_events=True) as profiler:
        started = time.perf_counter()
        for _ in range(times):
            call()
        _wait(ctx)
        wall_us = 1e6 * (time.perf_counter() - started)
    found = sorted(((_own_us(one, ctx.dry), one.count, one.key) for one in profiler.key_averages()), reverse=True)
    # Leave out driver calls, which take no device time.
    found = [one for one in found if one[0] > 0]
    busy = sum(us for us, *_ in found)
    ctx.row(case, "time", wall_us / times, "us", "with the profiler on")
    ctx.row(case, "share without a kernel", max(0.0, 1 - busy / wall_us))
    ctx.row(case, "kernels", sum(count for _, count, _ in found) / times)
    for us, count, name in found[:MOST_KERNELS]:
        ctx.row(case, name[:80], us / times, "us", f"{count / times:g} a call, {us / count:.1f} us each")


def _own_us(event: Any, dry: bool) -> float:
    return float(event.self_cpu_time_total if dry else event.self_device_time_total)


def _reserved(ctx: Context) -> int:
    return 0 if ctx.dry else int(runtime(ctx.device).memory_reserved(ctx.device))


def _wait(ctx: Context) -> None:
    if not ctx.dry:
        runtime(ctx.device).synchronize(ctx.device)
