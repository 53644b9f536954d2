"""Where the CPU's kernels compile, what is kept, and what runs without them; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
ROOT = Path(__file__).resolve().parents[3]

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
from tests.models import tiny
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


def test_two_processes_compile_at_once_and_a_third_loads(tmp_path: Path) -> None:
    for out in [ended(one)[0] for one in [run(SMALL, tmp_path) for _ in range(2)]]:
        assert out in (COMPILED, LOADED)
    assert ended(run(SMALL, tmp_path))[0] == LOADED


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
def test_damaged_code_is_compiled_again(tmp_path: Path, suffix: str) -> None:
    ended(run(SMALL, tmp_path))
    files = list(tmp_path.glob(f"*/**/*{suffix}"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert ended(run(SMALL, tmp_path))[0] == COMPILED
    assert ended(run(SMALL, tmp_path))[0] == LOADED


def test_without_a_folder_that_can_be_written_each_start_compiles(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    for _ in range(2):
        assert ended(run(SMALL, file))[0] == COMPILED


def test_code_of_other_versions_goes_when_nobody_has_used_it_for_long(tmp_path: Path) -> None:
    old, other = (tmp_path / f"{name}-numba-0" for name in ("00000000", "11111111"))
    for folder in (old, other):
        folder.mkdir()
    os.utime(old, (0, 0))
    ended(run(SMALL, tmp_path))
    assert other.exists() and not old.exists()


@pytest.mark.parametrize(
    ("before", "environment", "reason"),
    [
        ("", {"BASS_CPU_KERNELS": "0"}, "BASS_CPU_KERNELS is 0"),
        (BLOCKED.format(error="ModuleNotFoundError"), {}, "numba can't be imported (this numba is broken)"),
        (BLOCKED.format(error="SystemError"), {}, "numba can't be imported (this numba is broken)"),
    ],
)
def test_without_kernels_transformers_own_model_runs_and_it_is_said(
    tmp_path: Path, before: str, environment: dict[str, str], reason: str
) -> None:
    out, err = ended(run(PAIR.format(before=before), tmp_path, **environment))
    bfloat16, name, float32 = out.splitlines()
    assert bfloat16.endswith(f"bfloat16, cpu, transformers' own model ({reason}))")
    assert name == "CausalModel"
    assert float32.endswith("float32, cpu, transformers' own model (our kernels take 16 bits and fewer))")
    assert err.count("LOG The CPU's own kernels are off") == 1 and reason in err
