"""The shipped pair on this device: its lanes by batch size, and what a round of each launches.

If its weights can't be fetched, the section reports only that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bass_core import ModelPair, load_pair
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.errors import WeightsError
from bass_core.lanes.lane import Lane
from bass_core.sample.params import SamplingParams
from kernels.support import is_accelerator, runtime

from ..cpu.batch import rows_of, samples_of
from ..machine import measure
from ..prompts import mixed
from ..report.report import median
from .context import Context

# Events of torch's profiler that mean one launch or one copy by the host.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
# Modes to count the launches of: options of a request.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": SamplingParams(0.7)},
    "top-p": {"sampling": SamplingParams(0.7, top_p=0.95)},
}
ROUNDS = 6


def shipped(ctx: Context) -> None:
    """Time the lanes of the shipped pair at each batch size, and count what a round launches in each mode."""
    try:
        pair = load_pair("smollm2", device=str(ctx.device))
    except WeightsError as error:
        ctx.row("smollm2", f"left out: {error}"[:300], None)
        return
    tokens, repeats = (6, 1) if ctx.tiny else (64, 1 if ctx.quick else 2)
    for size in (1, 2) if ctx.tiny else (1, 8) if ctx.quick else (1, 8, 32):
        for mode, chosen in MODES.items() if not ctx.tiny else [("greedy", {})]:
            for method in ("regular", "bass"):
                _count(ctx, pair, f"{mode} b{size} {method}", method, size, chosen)
    machine = measure(ctx.device, ctx.dtype)
    for size in (2,) if ctx.tiny else (8,) if ctx.quick else (8, 1, 4, 32, 2, 16):
        samples = samples_of(pair, mixed(size), tokens, repeats, drafter="adaptive")
        for row in rows_of(size, samples, machine):
            case = f"b{row.pop('batch')} {row.pop('arm')}"
            for name, value in row.items():
                if value is not None:
                    ctx.row(case, name, value)


def _count(ctx: Context, pair: ModelPair, case: str, method: str, size: int, options: dict[str, Any]) -> None:
    """Report a round's time, and its launches and copies by the host, with three drafts per row."""
    request = make_request(
        pair,
        mixed(size),
        max_new_tokens=32 if ctx.tiny else 100,
        draft_length=3,
        drafter="model",
        eos_token_id=None,
        **options,
    )
    lane = Lane(pair, with_costs(pair, request, size), method)
    lane.prepare()
    for _ in range(4):
        lane.step()
    times = [_timed(lane.step, ctx.device) for _ in range(1 if ctx.tiny else ROUNDS)]
    ctx.row(case, "round", median(times), "ms")
    if ctx.device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            lane.step()
            torch.cuda.synchronize(ctx.device)
        events = profiler.key_averages()
        for what, names in (("launches", LAUNCHES), ("copies", COPIES)):
            ctx.row(case, what, sum(row.count for row in events if row.key in names))
        busy = sum(
            row.self_device_time_total for row in events if row.device_type != torch.autograd.DeviceType.CPU
        )
        ctx.row(case, "kernels", busy / 1000, "ms")
        ctx.row(case, "torch ops", sum(row.count for row in events if row.key.startswith("aten::")))
    lane.end("stopped")


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if is_accelerator(device):
        runtime(device).synchronize(device)
    return 1000 * (time.perf_counter() - start)
