"""`python -m bench.gpu.section_process NAME ...`: one process of the GPU bench, running sections one after
another.

Contract: appends lines (results.py) to --out as results come. A section that fails is reported, and the next one
runs. If the device no longer answers, as after an illegal memory access, the process ends with status BROKEN. It
also runs on its own under NVIDIA's tools: `compute-sanitizer --tool memcheck` or
`ncu -k regex:"attend|skinny" -c 20`, and then `python -m bench.gpu.section_process checks --quick --device cuda
--seconds 600 --out LINES --recordings FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from pathlib import Path

import torch

from .context import BROKEN, Context, answers
from .plan import MINUTES, reserved
from .sections import attention, checks, faults, graphs, lanes, products, profiles, races, roofline
from .timing import counted_compiles

SECTIONS = {
    "smoke": faults.smoke,
    "checks": checks.run,
    "graphs": graphs.run,
    "products": products.run,
    "roofline": roofline.run,
    "profile": profiles.run,
    "lanes": lanes.run,
    "races": races.run,
    "faults": faults.run,
    "attention": attention.run,
    "smollm2": lanes.smollm2,
    "compiled": lanes.compiled,
}
# Sections that run with the tiles and plans that earlier sections found fastest.
_TUNED = ("profile", "lanes", "races")


def main() -> None:
    """Run the named sections."""
    asked = _options()
    deadline = time.monotonic() + asked.seconds
    ctx = Context(torch.device(asked.device), asked.out, deadline, asked.seed, asked.quick, asked.recordings)
    ctx.part, ctx.after = (asked.part[0], asked.part[1]), asked.after
    for name in asked.names:
        ctx.section = name
        ctx.deadline = deadline - reserved(name, asked.names, MINUTES)
        if ctx.late and name != asked.names[0]:
            ctx.emit(kind="failed", section=name, part=ctx.part[0], error="no time was left for it")
            continue
        run(ctx, name)


def run(ctx: Context, name: str) -> None:
    """Run one section and record its start, and its end or failure."""
    started = time.monotonic()
    ctx.emit(kind="start", section=name, part=ctx.part[0])
    print(f"{name}:", flush=True)
    try:
        with counted_compiles(ctx):
            if name in _TUNED:
                roofline.apply_chosen(ctx)
            SECTIONS[name](ctx)
        if not answers(ctx.device):
            raise RuntimeError("the device no longer answers")
        ctx.emit(kind="end", section=name, part=ctx.part[0], seconds=round(time.monotonic() - started, 1))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:500]
        ctx.emit(kind="failed", section=name, part=ctx.part[0], error=text)
        if not answers(ctx.device):
            os._exit(BROKEN)


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="+", choices=list(SECTIONS))
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--recordings", type=Path, required=True)
    options.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "OF"))
    options.add_argument("--after", type=int, default=0, metavar="CASES", help="cases that were run already")
    return options.parse_args()


if __name__ == "__main__":
    main()
