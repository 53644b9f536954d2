"""The cache of compiled CPU kernels, and the wait policy of torch's threads; each test starts new processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bass_core.machine import cpu_kernels
from tests.support import ROOT

pytestmark = pytest.mark.slow
needs_numba = pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")

ONE_KERNEL = """
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
# Code that makes every import of numba fail.
BLOCKED = """
class Blocker:
    def find_spec(self, name, *_):
        if name == "numba":
            raise {error}("this numba is broken")
sys.meta_path.insert(0, Blocker())
"""


def run(code: str, cache: Path, tree: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(tree), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=tree, env=env, stdout=pipe, stderr=pipe, text=True)


def output_of_process(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


COMPILED, LOADED = "a bar\nclosed\ncompiled\n", "loaded\n"


@needs_numba
def test_code_is_compiled_once_and_again_if_it_is_damaged(tmp_path: Path) -> None:
    """Compiled code of other versions is removed if it was not used for a long time."""
    old, other = (tmp_path / f"{name}-numba-0" for name in ("00000000", "11111111"))
    for folder in (old, other):
        folder.mkdir()
    os.utime(old, (0, 0))
    for out in [output_of_process(process)[0] for process in [run(ONE_KERNEL, tmp_path) for _ in range(2)]]:
        assert out in (COMPILED, LOADED)
    assert other.exists() and not old.exists()
    for suffix in (".nbc", ".nbi"):
        assert output_of_process(run(ONE_KERNEL, tmp_path))[0] == LOADED
        files = list(tmp_path.glob(f"*/**/*{suffix}"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:100])
        assert output_of_process(run(ONE_KERNEL, tmp_path))[0] == COMPILED


@needs_numba
def test_a_copy_of_the_sources_compiles_nothing_until_one_of_them_changes(tmp_path: Path) -> None:
    """The changed source is not that of the kernel: numba itself would not notice it. Another CPU compiles too."""
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    shutil.copytree(ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    assert output_of_process(run(ONE_KERNEL, cache))[0] == COMPILED
    assert output_of_process(run(ONE_KERNEL, cache, copy))[0] == LOADED
    assert output_of_process(run(ONE_KERNEL, cache, copy, NUMBA_CPU_FEATURES="+fma,+f16c"))[0] == COMPILED
    with open(copy / "kernels" / "cpu" / "kinds.py", "a") as source:
        source.write("# changed\n")
    assert output_of_process(run(ONE_KERNEL, cache, copy))[0] == COMPILED
    assert output_of_process(run(ONE_KERNEL, cache))[0] == LOADED


@needs_numba
def test_without_a_writable_folder_each_start_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert output_of_process(run(ONE_KERNEL, tmp_path / "file"))[0] == COMPILED


def test_without_kernels_transformers_model_runs_and_the_reason_is_logged(tmp_path: Path) -> None:
    for before, environment, reason in (
        ("", {"BASS_CPU_KERNELS": "0"}, "BASS_CPU_KERNELS is 0"),
        (BLOCKED.format(error="SystemError"), {}, "numba can't be imported (this numba is broken)"),
    ):
        out, err = output_of_process(run(PAIR.format(before=before), tmp_path, **environment))
        bfloat16, name, float32 = out.splitlines()
        assert bfloat16.endswith(f"bfloat16, cpu, transformers' own model ({reason}))")
        assert name == "CausalModel"
        assert float32.endswith("float32, cpu, transformers' own model (our kernels take 16 bits and fewer))")
        assert err.count("LOG The CPU's own kernels are off") == 1 and reason in err


@needs_numba
def test_kernels_are_off_if_numba_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu.calls import jit

    monkeypatch.setattr(jit.config, "DISABLE_JIT", 1)
    assert cpu_kernels.why_unavailable.__wrapped__() == "NUMBA_DISABLE_JIT is 1"


class Bar:
    """Counts like a progress bar."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.closed = total, 0, False

    def update(self) -> None:
        self.done += 1

    def close(self) -> None:
        self.closed = True


@needs_numba
@pytest.mark.parametrize(("status", "failing"), [(0, ""), (1, "rest"), (1, "sampling")])
def test_processes_that_compile_are_waited_for_and_not_started_again_if_they_succeed(
    status: int, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cpu.calls import compilers, jit

    started, bars = [], []

    def start(part: str, forms: tuple[str, ...]) -> subprocess.Popen[str]:
        started.append((part, forms))
        code = f"print(); print(); raise SystemExit({status if part == failing else 0})"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    def bar(total: int) -> Bar:
        bars.append(Bar(total))
        return bars[-1]

    monkeypatch.setattr(jit, "folder", tmp_path)
    monkeypatch.setattr(compilers, "_start", start)
    monkeypatch.setattr(compilers, "_cores", lambda: 2)
    for _ in range(2):
        compilers.start("bfloat16")
        compilers.start("bfloat16")  # they are running already
        compilers.finish(bar)
        # A load leaves the last part to the first request.
        assert compilers.running() == (len(bars) % 2 == 1)
        compilers.start("bfloat16")
        compilers.finish(bar, compilers.ALL)
        assert not compilers.running()
    compilers.start("float32")
    compilers.finish(bar, compilers.ALL)
    times = 2 if status else 1
    assert started == [(part, ("bfloat16", "int8")) for part in compilers.ALL] * times
    first, last = (sum(map(compilers.FUNCTIONS.get, parts)) for parts in (compilers.FIRST, ("sampling",)))
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(first, 4, True), (last, 2, True)] * times


@needs_numba
def test_processes_that_compile_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cpu.calls import compilers

    (tmp_path / "numba.py").write_text("import os; os._exit(77)")
    monkeypatch.setattr(sys, "path", [str(ROOT), *filter(None, sys.path)])
    monkeypatch.chdir(tmp_path)
    process = compilers._start("unknown part", ("bfloat16",))
    process.communicate()
    assert process.returncode == 1  # KeyError, after the imports


@needs_numba
def test_a_fork_does_not_wait_for_its_parent_s_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu.calls import compilers

    monkeypatch.setattr(compilers, "_processes", {"rest": None})
    with compilers._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if not compilers.running() and compilers._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Prints the names of the kernels that loading a pair and its first request compile, and whether a process still
# compiles after each of the two.
LOADED_PAIR = """
from numba.core import event
class Counter(event.Listener):
    def on_start(self, happened):
        print(happened.data["dispatcher"].py_func.__qualname__)
    def on_end(self, happened):
        pass
event.register("numba:compile", Counter())
from bass_core import load_pair
from kernels.cpu.calls import compilers
pair = load_pair("smollm2", device="cpu", dtype="bfloat16")
left = compilers.running()
pair.refresh()
print(left, compilers.running())
"""


@needs_numba
def test_the_default_pair_and_its_first_request_compile_nothing_after_the_processes(smollm2_folder: Path) -> None:
    """It takes a minute if the user's cache has no code of these sources yet, and seconds otherwise."""
    from kernels.cpu.calls import compilers, jit

    if compilers._cores() < 2:
        pytest.skip("a single core has no processes that compile")
    # Without the mark, a load starts the processes.
    mark = jit.compiled_folder() / f"{'-'.join(compilers.FORMS['bfloat16'])}.complete"
    mark.unlink(missing_ok=True)
    command = [sys.executable, "-c", LOADED_PAIR]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert lines == ["True", "False"] and mark.exists()


# Prints the value that libgomp would read when torch is loaded.
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


def output_of(program: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name} | variables
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300).stdout.strip()


def test_the_spin_of_idle_threads_is_set_before_torch_is_loaded_unless_the_user_set_it() -> None:
    # The last line checks that child processes do not inherit the variable.
    assert output_of(PROGRAM) == "10000" and output_of(PROGRAM, GOMP_SPINCOUNT="7") == "7"
    assert output_of(PROGRAM, OMP_WAIT_POLICY="PASSIVE") == "None"
    assert output_of("import os, bass_core; print('GOMP_SPINCOUNT' in os.environ)") == "False"


# Stores costs first, so that the races measure none. Loads compiled code from the folder in its argument.
RACES = """
import json, pathlib, pkgutil, sys
from importlib import import_module
from kernels.cpu.calls import jit
jit.folder = pathlib.Path(sys.argv[1])
import torch
from numba.core import event
from numba.core.registry import CPUDispatcher

import kernels.cpu
from bass_core import ModelPair, SamplingParams, race
from bass_core.model.attention import choose_backend
from bass_core.length.costs import CostTable, write_table
from bass_core.decode.cost_store import costs_path
from bass_core.draft.registry import choose_drafter
from tests.support.models import tiny_pair

class Counter(event.Listener):
    names = []
    def on_start(self, happened):
        self.names.append(happened.data["dispatcher"].py_func.__qualname__)
    def on_end(self, happened):
        pass

def signatures():
    modules = [import_module(info.name) for info in pkgutil.walk_packages(kernels.cpu.__path__, "kernels.cpu.")]
    compiled = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    called = [kernel for kernel in compiled if not kernel.targetoptions.get("no_cpython_wrapper")]
    return {kernel.py_func.__qualname__: len(kernel.overloads) for kernel in called}

pair = tiny_pair("head", to=torch.bfloat16)
before, compiled = signatures(), len(Counter.names)
torch.set_num_threads(2)
backend = choose_backend("auto", pair.device, pair.dtype)
settings = [SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, top_p=0.9), SamplingParams(0.7, top_k=5)]
# Rounds must not take less, because the costs would then be measured again.
costs = {rows: [(rows, 0.01), (9.0 * rows, 0.011)] for rows in (1, 2, 4, 8)}
for sampling in settings:
    path = costs_path(pair, choose_drafter(pair, "auto"), backend, sampling)
    write_table(path, CostTable(costs, dict.fromkeys(costs, 1e-4), False))

event.register("numba:compile", Counter())
load = jit._Code.load_overload
def noted(self, *arguments):
    Counter.names.append(self._name)
    return load(self, *arguments)
jit._Code.load_overload = noted
measured = drafted = 0
for n, number, rule, length in (
    (1, 0, "auto", "auto"), (4, 1, "auto", "auto"), (4, 2, "coupled", "auto"), (1, 1, "block", 3),
    (1, 2, "rejection", "bass"), (4, 3, "auto", "auto"), (4, 0, "auto", 2),
):
    prompts = [[5, 6, 7, 8 + row] for row in range(n)]
    options = {"sampling": settings[number], "verification": rule, "draft_length": length, "max_new_tokens": 12}
    for snapshot in race(pair, prompts, eos_token_id=None, **options):
        measured += "measuring" in snapshot
    drafted += snapshot["lanes"]["bass"]["metrics"]["drafted"] or 0
print(json.dumps([before, signatures(), Counter.names, measured, drafted]))
"""


@needs_numba
def test_the_first_races_compile_nothing(tmp_path: Path) -> None:
    """The first races also load no compiled code from disk, because loading takes time too.

    Samplings, rules and batch sizes vary. It takes a minute if the user's cache has no code of these sources yet.
    """
    from kernels.cpu.calls import jit

    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "BASS_MEASURE": "1"}
    command = [sys.executable, "-c", RACES, str(jit.folder)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, after, compiled, measured, drafted = json.loads(result.stdout.splitlines()[-1])
    assert compiled == [] and after == before
    assert not measured and drafted
    # Every kernel has only one signature, because each signature must be compiled before a race. `attend_layers`
    # has no compiled signature, because only a benchmark calls it.
    assert {name: number for name, number in after.items() if number != 1} == {"attend_layers": 0}
