"""`python -m bench.gpu.sections NAME ...`: one process of the GPU bench, running sections one after another.

Contract: writes JSON lines to --out as results come: {"kind": "start" | "row" | "plan" | "end" | "failed", ...}. A
section that fails is reported, and the next one runs; a process that dies loses the section it was in alone.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import torch

from bass_core.gpu_model import GpuModel

from . import attention, checks, graphs, lanes, products, races, roofline, smollm2
from .context import Context

SECTIONS = {
    "checks": checks.run,
    "graphs": graphs.run,
    "roofline": roofline.run,
    "lanes": lanes.run,
    "attention": attention.run,
    "products": products.run,
    "races": races.run,
    "smollm2": smollm2.run,
    "compiled": lanes.compiled,
}


# Seconds that are kept for a section by those before it in the same process.
NEEDS = {"lanes": 100.0, "races": 75.0}


def main() -> None:
    """Run the named sections."""
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="+", choices=list(SECTIONS))
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--recordings", type=Path, required=True)
    options.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "OF"))
    options.add_argument("--plan", nargs=2, action="append", default=[], metavar=("MODEL", "PLAN"))
    asked = options.parse_args()
    deadline = time.monotonic() + asked.seconds
    ctx = Context(torch.device(asked.device), asked.out, deadline, asked.seed, asked.quick, asked.recordings)
    ctx.part = (asked.part[0], asked.part[1])
    for index, name in enumerate(asked.names):
        ctx.section = name
        ctx.deadline = deadline - sum(NEEDS.get(later, 0.0) for later in asked.names[index + 1 :])
        if ctx.late:
            ctx.emit(kind="failed", section=name, error="no time was left for it")
            continue
        started = time.monotonic()
        ctx.emit(kind="start", section=name)
        print(f"{name}:", flush=True)
        try:
            if asked.plan and name in ("lanes", "races"):
                set_plans(ctx, dict(asked.plan))
            SECTIONS[name](ctx)
            ctx.emit(kind="end", section=name, seconds=round(time.monotonic() - started, 1))
        except Exception as error:
            traceback.print_exc()
            ctx.emit(kind="failed", section=name, error=f"{type(error).__name__}: {error}"[:500])
        if not ctx.dry:
            torch.cuda.empty_cache()


def set_plans(ctx: Context, plans: dict[str, str]) -> None:
    """The plans that an earlier process found fastest."""
    for name, step in (("target", ctx.pair.target_step), ("draft", ctx.pair.draft_step)):
        if isinstance(step, GpuModel) and name in plans:
            step.plan = roofline.PLANS[plans[name]]


if __name__ == "__main__":
    main()
