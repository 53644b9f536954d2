"""Speed: the arms of `python -m bench batch` on a large pair, its steps compared with their floor, and a profile.

The pair has random weights, so drafts are accepted with a given probability; everything else is real work. The
floor of a step is that of bench/machine.py: the longer of reading its bytes and multiplying. If bass_core/predict
knows the card, we also compare with the prediction of the simulated clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bass_core import ModelPair, race
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.machine.memory import private_pools
from bass_core.machine.monitor import GPU_FIELDS
from bass_core.model import flash
from bass_core.model.attention import choose_backend
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.graphs import GraphRunner, make_runner, release_idle
from bass_core.model.llama_cuda import LlamaCuda, ProductPlan
from bass_core.model.runner import ModelRunner
from bass_core.predict.hardware import HARDWARE, Hardware
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import shapes
from kernels.backends import BACKENDS, CAPTURABLE, why_backend_unavailable
from kernels.flash import version_for
from kernels.support import available, is_accelerator, runtime

from ..cpu.batch import BASS, COST_AWARE, FIXED, GENERATE, REGULAR, SPECULATIVE, rows_of, samples_of
from ..machine import measure
from ..report.report import device_name, median
from .context import Context

# Plans: which matrix products run on our kernel, and how. We time all plans on the card to choose the best one.
PLANS = {
    "ours": ProductPlan(),
    "ours up to 16 rows": ProductPlan(most_rows=16),
    "torch at 1 row": ProductPlan(gemv=False),
    "torch": ProductPlan(most_rows=0),
    "ours at any size": ProductPlan(most_bytes=1 << 40),
}
MAX_KERNELS = 16
# Batch sizes and acceptances of `lanes`.
CASES = ((1, 0.8), (8, 0.8), (32, 0.8), (8, 0.6), (8, 0.9), (4, 0.8), (2, 0.8), (16, 0.8))
LENGTHS = (REGULAR, BASS, *FIXED)
# These take longer: `generate` runs without graphs, and the cost-aware policy measures its costs first.
OTHERS = (GENERATE, SPECULATIVE, COST_AWARE)


def lanes(ctx: Context) -> None:
    """Time regular decoding and BASS by batch and acceptance, the most decisive cases first."""
    pair, chosen = ctx.large_pair(), ctx.lanes
    cases: list[tuple[int, float]] = list(CASES[: 2 if ctx.quick else None])
    if ctx.tiny:
        cases = [(2, 0.8)]
    if chosen.batch or chosen.acceptance:
        cases = list(product(chosen.batch or (8,), chosen.acceptance or (0.8,)))
    _race(ctx, pair, cases, chosen.arms or LENGTHS)
    if not chosen.arms and not ctx.quick:
        _race(ctx, pair, [(2 if ctx.tiny else 8, 0.8)], OTHERS)


def one_layer(ctx: Context) -> None:
    """Time the lanes with a draft of one layer as wide as the target's, as in EAGLE-3."""
    _race(ctx, ctx.large_pair(one_layer=True), [(2, 0.8)] if ctx.tiny else [(1, 0.8), (8, 0.8)], LENGTHS)


def _race(ctx: Context, pair: ModelPair, cases: list[tuple[int, float]], arms: Seq[str]) -> None:
    machine = measure(ctx.device, ctx.dtype)
    tokens, repeats = (6, 1) if ctx.tiny else (64, 1 if ctx.quick else 3)
    for size, acceptance in cases:
        prompts = ctx.prompts(size, 384, 512, pair.vocab)
        samples = samples_of(
            pair, prompts, tokens, repeats, arms, drafter="model", synthetic_acceptance=acceptance
        )
        for row in rows_of(size, samples, machine):
            case = f"b{row.pop('batch')} a{acceptance} {row.pop('arm')}"
            # Regular decoding ran before, next to the other arms.
            for name, value in row.items() if arms is LENGTHS or not case.endswith(REGULAR) else ():
                if value is not None:
                    ctx.row(case, name, value)


def steps(ctx: Context) -> None:
    """Compare steps with their floor and prediction, time the target's under every plan, and profile a round."""
    pair, machine = ctx.large_pair(), measure(ctx.device, ctx.dtype)
    ctx.row("device", "bandwidth", machine.bandwidth / 1e9, "GB/s")
    ctx.row("device", "products", machine.flops / 1e12, "TFLOP/s")
    card = None if ctx.tiny else known_card(device_name(ctx.device))
    kvs, sizes = ((16,), (1, 2)) if ctx.tiny else ((512,), (1, 8)) if ctx.quick else ((512, 4096), (1, 8, 32))
    for model, kv, rows, width in product((pair.target_step, pair.draft_step), kvs, sizes, (1, 5)):
        assert model is not None
        drafts = model is pair.draft_step
        if drafts and width > 1:
            continue
        ms, tokens = step_ms(ctx, model, rows, width, kv), rows * width
        floor = max(machine.bytes_ms(model.cost, rows, kv + width), machine.flops_ms(model.cost, tokens, kv))
        case = f"{'draft' if drafts else 'target'} b{rows} x {width} kv{kv}"
        ctx.row(case, "step", ms, "ms")
        ctx.row(case, "step / floor", ms / floor)
        if card is not None:
            clock = Roofline(card, *shapes("7.8B"), context=kv)
            ctx.row(case, "step / predicted", ms / clock.step_ms(shapes("7.8B")[drafts], rows, tokens, 1))
    target = pair.target_step
    if isinstance(target, LlamaCuda):
        for (label, target.plan), (rows, width) in product(PLANS.items(), ((1, 1), (8, 1), (8, 5))):
            case, name = f"products by {label}", f"b{rows} x {width}"
            count = partial(_count_kernels, ctx, case, name, len(target.blocks))
            ctx.row(case, name, step_ms(ctx, target, rows, width, kvs[0], profiled=count), "ms")
        target.plan = ProductPlan()
    request = make_request(
        pair, ctx.prompts(sizes[1], 384, 512, pair.vocab), max_new_tokens=64, draft_length=5, drafter="model",
        eos_token_id=None, synthetic_acceptance=0.8,
    )  # fmt: skip
    lane = Lane(pair, request, "bass")
    for _ in range(4):
        lane.step()
    _profiled(ctx, f"round b{sizes[1]} l=5", lane.step)
    lane.end("stopped")


def backends(ctx: Context) -> None:
    """Time the target's steps with every attention that runs here, including PAD and SPLIT, captured and eager."""
    model, kv = ctx.large_pair().target_step, 16 if ctx.tiny else 512
    for backend, width in product(BACKENDS, (1, 5)):
        reason, rows = why_backend_unavailable(backend, ctx.device, ctx.dtype), 2 if ctx.tiny else 8
        if reason:
            ctx.row(f"attention {backend}", f"left out: {reason}", None)
            continue
        for graphs in (True, False) if backend in CAPTURABLE else (False,):
            ms = step_ms(ctx, model, rows, width, kv, backend, graphs)
            ctx.row(f"attention {backend}", f"b{rows} x {width}, {'captured' if graphs else 'eager'}", ms, "ms")
    _calls(ctx)


def _calls(ctx: Context) -> None:
    """Time the calls that decide where flash-attn is used, for heads as in Llama 3.1 8B and SmolLM2, and top-p."""
    version = version_for(ctx.device)
    ctx.row("flash-attn", version.name if version else "not installed", None)
    for heads, (kind, steps) in product(((32, 8, 128), (9, 3, 64)), flash.STEPS.items()):
        for step, backend in product(steps, ("fused", "flash")):
            if ctx.tiny or why_backend_unavailable(backend, ctx.device, ctx.dtype):
                continue
            ms = flash.step_ms(backend, kind, step, ctx.device, ctx.dtype, heads)
            ctx.row(f"{kind}, heads {heads}", f"{backend}, {step[0]} x {step[1]} after {step[2]}", 1000 * ms, "us")
    if not ctx.tiny and available(ctx.device):
        from kernels.triton.nucleus import threshold

        for vocab, rows in product((49152, 128256), (1, 8, 40)):
            probs = (torch.randn(rows, vocab, device=ctx.device) * 3).softmax(-1)
            ms = flash.call_ms(partial(threshold, probs, 0.9), ctx.device, True)
            ctx.row("top-p", f"{rows} rows of {vocab}", 1000 * ms, "us")


def readings(ctx: Context) -> None:
    """Report the readings of NVML and GPM while only one lane runs, and the memory that it takes."""
    pair = ctx.large_pair()
    prompts = ctx.prompts(2 if ctx.tiny else 8, 384, 512, pair.vocab)
    options: dict[str, Any] = {"max_new_tokens": 6 if ctx.tiny else 128, "eos_token_id": None, "draft_length": 5}
    options |= {"drafter": "model", "synthetic_acceptance": 0.8, "scheduling": "in_turn"}
    seen: list[dict[str, Any]] = [
        {**snapshot["device"]} for snapshot in race(pair, prompts, lanes=("bass",), **options)
    ]
    for name in GPU_FIELDS:
        values = [reading[name] for reading in seen if reading.get(name) is not None]
        ctx.row("a race of BASS", name if values else f"{name}: not read", median(values) if values else None)
    if is_accelerator(ctx.device):
        module = runtime(ctx.device)
        pools = sum(reserved for reserved, _ in private_pools(ctx.device).values())
        sizes = {"allocated": module.memory_allocated(ctx.device), "reserved": module.memory_reserved(ctx.device)}
        for name, size in (sizes | {"of captured steps": pools}).items():
            ctx.row("memory", name, size / 2**20, "MB")


def known_card(name: str) -> Hardware | None:
    """Return the datasheet of the card with this name, or None if bass_core/predict has none."""
    return next((card for card in HARDWARE.values() if set(card.name.split()) <= set(name.split())), None)


@torch.inference_mode()
def step_ms(
    ctx: Context,
    model: CausalModel,
    rows: int,
    width: int,
    kv: int,
    backend: str = "auto",
    graphs: bool = True,
    profiled: Callable[[Callable[[], object]], None] | None = None,
) -> float:
    """Return the median milliseconds of a step, or of its replay if it was captured.

    Args:
        rows: the batch size.
        width: new tokens per row.
        kv: cached tokens per row.
        graphs: whether to capture the step.
        profiled: is called with the step at the end.
    """
    make = make_runner if graphs else ModelRunner
    runner = make(model, rows, kv + width, model.vocab, choose_backend(backend, ctx.device, ctx.dtype))
    # Fill the cache with noise: over zeros, even a wrong kernel would give the correct sum.
    runner.cache.buffer.normal_()
    batch = ForwardBatch(torch.randint(0, model.vocab, (rows, width)).to(ctx.device), [kv] * rows)
    call: Callable[[], object] = partial(runner.forward, batch)
    call()
    if isinstance(runner, GraphRunner):
        if not runner.slot.steps:
            raise RuntimeError("the step could not be captured")
        call = next(reversed(runner.slot.steps.values())).replay
    ms = milliseconds(call, ctx.device)
    if profiled is not None:
        profiled(call)
    del runner, call
    release_idle(model)
    return ms


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time of a call; on an accelerator, from the first launch to the end of the last kernel."""
    times: list[float] = []
    for _ in range(repeats + 3):
        if is_accelerator(device):
            begin, end = (runtime(device).Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - start))
    return median(times[3:])


def _count_kernels(ctx: Context, case: str, name: str, layers: int, call: Callable[[], object]) -> None:
    """Report the kernels of a step, those before and after its layers included, per layer."""
    count = sum(count for _, count, _ in _profile(ctx, call)[1])
    ctx.row(case, f"{name}: kernels per layer", count / layers)


def _profiled(ctx: Context, case: str, call: Callable[[], object]) -> None:
    """Report the kernels of a call, and the share of time without one."""
    wall_us, rows = _profile(ctx, call)
    ctx.row(case, "time with the profiler", wall_us, "us")
    ctx.row(case, "share without a kernel", max(0.0, 1 - sum(us for us, *_ in rows) / wall_us))
    for us, count, name in rows[:MAX_KERNELS]:
        ctx.row(case, name[:80], us, f"us in {count} calls")


def _profile(ctx: Context, call: Callable[[], object]) -> tuple[float, list[tuple[float, int, str]]]:
    """Return a call's microseconds, and for each kernel its microseconds, calls and name, the longest first."""
    cuda = ctx.device.type == "cuda"
    call()
    with profile(
        activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        started = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(ctx.device)
        wall_us = 1e6 * (time.perf_counter() - started)
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = ((getattr(row, spent), row.count, row.key) for row in profiler.key_averages())
    return wall_us, sorted(rows, reverse=True)
