"""What a process compiles, keeps and finds set when it starts: the CPU's kernels and torch's idle threads.

Contract: each start is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bass_core.machine import cpu_kernels
from tests.support import ROOT

pytestmark = pytest.mark.slow
needs_numba = pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")

SMALL = """
import os, pathlib, sys
import numpy as np
from kernels.cpu.calls import jit
jit.folder = pathlib.Path(os.environ["XDG_CACHE_HOME"])
from kernels.cpu.calls.threads import watch
class Bar:
    def __init__(self): print("a bar")
    def update(self): pass
    def close(self): print("closed")
with jit.watched(Bar):
    watch(np.zeros(1, np.int64), -1)
print("loaded" if sum(watch.stats.cache_hits.values()) else "compiled")
"""
PAIR = """
import logging, sys
logging.basicConfig(format="LOG %(message)s")
{before}
import torch
from bass_core import ModelPair
from tests.support.models import tiny, tiny_pair
pair = ModelPair(tiny("llama").to(torch.bfloat16))
print(pair)
print(type(pair.target_step).__name__)
print(ModelPair(tiny("llama")))
"""
# An importer that stands before all others.
BLOCKED = """
class Blocker:
    def find_spec(self, name, *_):
        if name == "numba":
            raise {error}("this numba is broken")
sys.meta_path.insert(0, Blocker())
"""


def run(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


COMPILED, LOADED = "a bar\nclosed\ncompiled\n", "loaded\n"


@needs_numba
def test_code_is_compiled_once_and_again_where_it_is_damaged(tmp_path: Path) -> None:
    """Code of other versions goes when nobody has used it for long."""
    old, other = (tmp_path / f"{name}-numba-0" for name in ("00000000", "11111111"))
    for folder in (old, other):
        folder.mkdir()
    os.utime(old, (0, 0))
    for out in [ended(one)[0] for one in [run(SMALL, tmp_path) for _ in range(2)]]:
        assert out in (COMPILED, LOADED)
    assert other.exists() and not old.exists()
    for suffix in (".nbc", ".nbi"):
        assert ended(run(SMALL, tmp_path))[0] == LOADED
        files = list(tmp_path.glob(f"*/**/*{suffix}"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:100])
        assert ended(run(SMALL, tmp_path))[0] == COMPILED


@needs_numba
def test_without_a_folder_that_can_be_written_each_start_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert ended(run(SMALL, tmp_path / "file"))[0] == COMPILED


def test_without_kernels_transformers_own_model_runs_and_it_is_said(tmp_path: Path) -> None:
    for before, environment, reason in (
        ("", {"BASS_CPU_KERNELS": "0"}, "BASS_CPU_KERNELS is 0"),
        (BLOCKED.format(error="SystemError"), {}, "numba can't be imported (this numba is broken)"),
    ):
        out, err = ended(run(PAIR.format(before=before), tmp_path, **environment))
        bfloat16, name, float32 = out.splitlines()
        assert bfloat16.endswith(f"bfloat16, cpu, transformers' own model ({reason}))")
        assert name == "CausalModel"
        assert float32.endswith("float32, cpu, transformers' own model (our kernels take 16 bits and fewer))")
        assert err.count("LOG The CPU's own kernels are off") == 1 and reason in err


# What libgomp would read at this moment, when torch is loaded, and what is set afterwards.
PROGRAM = """
import os, sys
class Loaded:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise SystemExit
sys.meta_path.insert(0, Loaded())
import bass_core
"""


def said(program: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name} | variables
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300).stdout.strip()


def test_idle_threads_are_told_to_wait_before_torch_is_loaded_unless_the_user_has() -> None:
    """And no child inherits it."""
    assert said(PROGRAM) == "10000" and said(PROGRAM, GOMP_SPINCOUNT="7") == "7"
    assert said(PROGRAM, OMP_WAIT_POLICY="PASSIVE") == "None"
    assert said("import os, bass_core; print('GOMP_SPINCOUNT' in os.environ)") == "False"


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

pair = tiny_pair("head", to=torch.bfloat16)
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


@needs_numba
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
