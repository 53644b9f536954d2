"""A stand-in for a process of the GPU bench, without a model, whose device fails where the plan says so.

`python fake_gpu_process.py PLAN ...` takes the options of bench.gpu.sections. PLAN is JSON, {section: what}, with
what one of "dies" (the process is killed midway), "sticky" (an error after which the device no longer answers),
"raises" (an error that the device survives), or {"cases": [what, ...]}, each "passes", "raises", "sticky" or
"dies". Sections that are not in the plan succeed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import context
from bench.gpu import section_process as sections

plan = json.loads(sys.argv.pop(1))
broken = False


def answers(_device):
    return not broken


def act(what):
    global broken
    if what == "dies":
        os._exit(9)
    broken = broken or what == "sticky"
    if what in ("sticky", "raises"):
        raise RuntimeError(f"CUDA error: {what}")


def run(ctx):
    what = plan.get(ctx.section, "runs")
    ctx.row("a row", "written before", 1)
    if isinstance(what, dict):
        cases = enumerate(what["cases"])
        ctx.cases(("group", index, f"case {index}", lambda one=one: act(one)) for index, one in cases)
    else:
        act(what)


context.answers = sections.answers = answers
sections.SECTIONS = dict.fromkeys(sections.SECTIONS, run)
sections.roofline.apply_chosen = lambda ctx: None
sections.main()
