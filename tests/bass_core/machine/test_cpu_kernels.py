"""Where the CPU's kernels compile, what is kept, and what runs without them; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
ROOT = Path(__file__).resolve().parents[3]

PRODUCT = """
import torch
from bass_core.machine import cpu_kernels
assert cpu_kernels.available(), cpu_kernels.why_unavailable()
with cpu_kernels.compiling(torch.device("cpu")):
    from kernels.cpu.packing import pack
    from kernels.cpu.products import linear, _linear
    weight = torch.arange(256).view(8, 32).bfloat16()
    torch.testing.assert_close(linear(torch.ones(3, 32), pack(weight)), weight.float().sum(1).expand(3, 8))
print("loaded" if sum(_linear.stats.cache_hits.values()) else "compiled")
"""
PAIR = """
import logging, sys
logging.basicConfig(format="LOG %(message)s")
{before}
import torch
from bass_core import ModelPair
from tests.models import tiny_llama
print(ModelPair(tiny_llama().to(torch.bfloat16)))
print(ModelPair(tiny_llama().to(torch.bfloat16)).target_step.__class__.__name__)
print(ModelPair(tiny_llama()))
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


def test_two_processes_compile_at_once_and_a_third_loads(tmp_path: Path) -> None:
    for out, err in [ended(one) for one in [run(PRODUCT, tmp_path) for _ in range(2)]]:
        assert out in ("compiled\n", "loaded\n")
        assert ("Compiling the CPU's kernels, once" in err) == (out == "compiled\n")
    out, err = ended(run(PRODUCT, tmp_path))
    assert out == "loaded\n" and "Compiling" not in err


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
def test_damaged_code_is_compiled_again(tmp_path: Path, suffix: str) -> None:
    ended(run(PRODUCT, tmp_path))
    files = list(tmp_path.glob(f"bass/compiled/*/**/*{suffix}"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert ended(run(PRODUCT, tmp_path))[0] == "compiled\n"
    assert ended(run(PRODUCT, tmp_path))[0] == "loaded\n"


def test_a_cache_that_is_no_folder_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "bass").write_text("a file")
    ended(run(PRODUCT, tmp_path))


def test_code_of_other_versions_goes_when_nobody_has_used_it_for_long(tmp_path: Path) -> None:
    old, other = (tmp_path / "bass" / "compiled" / f"{name}-numba-0" for name in ("00000000", "11111111"))
    for folder in (old, other):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    ended(run(PRODUCT, tmp_path))
    assert other.exists() and not old.exists()


@pytest.mark.parametrize(
    ("before", "environment", "reason"),
    [
        ("", {"BASS_CPU_KERNELS": "0"}, "BASS_CPU_KERNELS is 0"),
        (BLOCKED.format(error="ModuleNotFoundError"), {}, "numba can't be imported (this numba is broken)"),
        (BLOCKED.format(error="SystemError"), {}, "numba can't be imported (this numba is broken)"),
    ],
)
def test_without_kernels_torch_multiplies_and_it_is_said(
    tmp_path: Path, before: str, environment: dict[str, str], reason: str
) -> None:
    out, err = ended(run(PAIR.format(before=before), tmp_path, **environment))
    bfloat16, name, float32 = out.splitlines()
    assert bfloat16.endswith(f"torch.bfloat16, cpu, torch's products ({reason}))".replace("torch.bf", "bf"))
    assert name == "LlamaCpu" and float32.endswith("float32, cpu)")
    assert err.count("LOG The CPU's own kernels are off") == 1 and reason in err
