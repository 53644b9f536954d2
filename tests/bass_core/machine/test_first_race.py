"""What the first races of a process compile, in one that finds no compiled code but knows what rounds cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bass_core.machine import cpu_kernels

ROOT = Path(__file__).resolve().parents[3]
# Costs are written where a pair looks for them, so that nothing is measured before the lanes' clocks run.
RACES = """
import json, pkgutil
from importlib import import_module
import torch
from numba.core import event
from numba.core.registry import CPUDispatcher

import kernels.cpu
from bass_core import ModelPair, SamplingParams, race
from bass_core.model.attention import choose_backend
from bass_core.length.costs import CostTable, write_table
from bass_core.decode.cost_store import costs_path
from bass_core.draft.registry import choose_drafter
from tests.conformance.table import head
from tests.models import tiny

class Counter(event.Listener):
    names = []
    def on_start(self, happened):
        self.names.append(happened.data["dispatcher"].py_func.__qualname__)
    def on_end(self, happened):
        pass

def signatures():
    modules = [import_module(one.name) for one in pkgutil.walk_packages(kernels.cpu.__path__, "kernels.cpu.")]
    found = {one for module in modules for one in vars(module).values() if isinstance(one, CPUDispatcher)}
    called = [one for one in found if not one.targetoptions.get("no_cpython_wrapper")]
    return {one.py_func.__qualname__: len(one.overloads) for one in called}

target = tiny("llama").to(torch.bfloat16)
pair = ModelPair(target, head(target).to(torch.bfloat16))
before, compiled = signatures(), len(Counter.names)
torch.set_num_threads(2)
backend = choose_backend("auto", pair.device, pair.dtype)
settings = [SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, top_p=0.9), SamplingParams(0.7, top_k=5)]
costs = {rows: [(rows, 10.0), (9.0 * rows, 11.0)] for rows in (1, 2, 4, 8)}
for sampling in settings:
    path = costs_path(pair, choose_drafter(pair, "auto"), backend, sampling)
    write_table(path, CostTable(costs, dict.fromkeys(costs, 0.1), False))

event.register("numba:compile", Counter())
measured = drafted = 0
for n, number, rule, length in (
    (1, 0, "auto", "auto"), (4, 1, "auto", "auto"), (4, 2, "coupled", "auto"), (1, 1, "block", 3),
    (1, 2, "rejection", "bass"), (4, 3, "auto", "auto"), (4, 0, "auto", 2),
):
    prompts = [[5, 6, 7, 8 + row] for row in range(n)]
    asked = {"sampling": settings[number], "verification": rule, "draft_length": length, "max_new_tokens": 12}
    for snapshot in race(pair, prompts, eos_token_id=None, **asked):
        measured += "measuring" in snapshot
    drafted += snapshot["lanes"]["bass"]["metrics"]["drafted"] or 0
print(json.dumps([before, signatures(), Counter.names, measured, drafted]))
"""


@pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
def test_the_first_races_compile_nothing(tmp_path: Path) -> None:
    """Neither for sampling nor for any rule or batch; code from disk isn't loaded either, which takes time too."""
    own = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "BASS_MEASURE": "1"}
    # Compiling takes half of the time where nothing is optimised.
    env = {**os.environ, **own, "NUMBA_OPT": "0"}
    done = subprocess.run([sys.executable, "-c", RACES], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, compiled, measured, drafted = json.loads(done.stdout.splitlines()[-1])
    assert compiled == [] and after == before
    assert not measured and drafted
    # Only a bench calls `alone`. More signatures of a kernel would be as many that somebody must prepare.
    assert {name: number for name, number in after.items() if number != 1} == {"alone": 0}
