"""`race()` of the three lanes, fair, in turn and overlapped, watched by NVML, and recordings for the page.

Contract: synthetic acceptance 0.8, batch 8, Algorithm 1. Each scheduling runs whole races until its time is up;
the first race's snapshots are thinned and stored as a recording. Texts spell token ids ("t17" is token 17), as the
weights are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bass_core import DEFAULT_LANES, ModelPair, Snapshot, race
from ui.recordings.recording import record, save

from .. import shapes
from ..context import Context

SECONDS = 20.0
MOST_SNAPSHOTS = 48


def run(ctx: Context) -> None:
    """Each lane alone, then races: fair, in turn, overlapped."""
    arguments: dict[str, Any] = {
        "max_new_tokens": 6 if ctx.dry else 256,
        "synthetic_acceptance": 0.8,
        "drafter": "model",
        "draft_length": "bass",
        "eos_token_id": None,
        "attention": ctx.backend,
    }
    prompts = ctx.prompts(2 if ctx.dry else 8)
    for _ in race(ctx.pair, prompts, scheduling="fair", **arguments):
        pass  # captures the graphs that the measured races use
    for method in DEFAULT_LANES:
        *_, last = race(ctx.pair, prompts, lanes=(method,), **arguments)
        report(ctx, f"{method} alone", last, method)
    for scheduling, seconds in (("fair", SECONDS), ("in_turn", SECONDS), ("overlap", 6.0)):
        if ctx.late:
            return
        one = watch(ctx, ctx.pair, prompts, scheduling, 0.0 if ctx.short else seconds, arguments)
        for method in DEFAULT_LANES:
            report(ctx, f"{method} {scheduling}", one, method)
    small_float32(ctx)


def watch(
    ctx: Context,
    pair: ModelPair,
    prompts: list[list[int]],
    scheduling: str,
    seconds: float,
    arguments: dict[str, Any],
) -> Snapshot:
    """Run races until the time is up; returns the last snapshot of the first race."""
    started = time.monotonic()
    busy: dict[str, list[float]] = {}
    first: list[Snapshot] = []
    while not first or time.monotonic() - started < seconds:
        snapshots = []
        for snapshot in race(pair, prompts, scheduling=scheduling, **arguments):
            snapshots.append(snapshot)
            for name, value in snapshot["device"].items():
                if name.startswith("gpu_") and isinstance(value, int | float):
                    busy.setdefault(name, []).append(float(value))
        first = first or snapshots
        if ctx.late:
            break
    for name, values in busy.items():
        ctx.row(f"NVML, {scheduling}", name, statistics.mean(values), "", "mean of the whole board")
    store(ctx, scheduling, first)
    return first[-1]


def report(ctx: Context, case: str, snapshot: Mapping[str, Any], method: str) -> None:
    """A lane's figures in a snapshot."""
    lane = snapshot["lanes"][method]
    if lane["error"]:
        ctx.row(case, "error", lane["error"])
    for what in ("ms_per_token", "acceptance_rate", "flops_utilization", "bandwidth_utilization"):
        ctx.row(case, what, lane["metrics"][what])


def store(ctx: Context, scheduling: str, snapshots: list[Snapshot]) -> None:
    """Write a recording: every k-th snapshot and the last."""
    step = -(-len(snapshots) // MOST_SNAPSHOTS)
    kept = snapshots[:-1][::step] + snapshots[-1:]
    name = "cpu-dry-run" if ctx.dry else torch.cuda.get_device_name(ctx.device)
    batch = len(kept[-1]["lanes"]["bass"]["sequences"])
    models = "tiny models" if ctx.dry else "7.8B target and 310M draft"
    about = f"{name}: {models} with random weights, batch {batch}, synthetic acceptance 0.8, {scheduling}"
    path = ctx.recordings / f"{name.lower().replace(' ', '-')}-{scheduling}.json.xz"
    write_recording(path, about, kept)
    ctx.row(f"recording {scheduling}", "snapshots", len(kept), "", path.name)


def write_recording(path: Path, about: str, snapshots: list[Snapshot]) -> None:
    """Write a recording for the page."""
    save(record(snapshots, about), path)


def small_float32(ctx: Context) -> None:
    """The share of rows that a race and transformers' `generate` write alike, in float32 on a small model."""
    from .graphs import own_text, share

    target = shapes.build(shapes.small_config(ctx.dry), ctx.device, torch.float32, ctx.seed, scale=6.0)
    pair = ModelPair(target, shapes.perturbed(target, 0.03, ctx.seed))
    rows = shapes.prompts(4, 5, 40, pair.vocab, ctx.seed)
    count = 6 if ctx.dry else 48
    theirs = [own_text(pair, row, count) for row in rows]
    for scheduling in ("fair", "overlap"):
        *_, last = race(pair, rows, scheduling=scheduling, max_new_tokens=count, eos_token_id=None, draft_length=4)
        for method in DEFAULT_LANES:
            ours = [sequence["token_ids"] for sequence in last["lanes"][method]["sequences"]]
            ctx.row(f"float32 race {scheduling} {method}", "rows equal to generate", share(ours, theirs))
