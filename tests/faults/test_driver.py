"""If Triton's driver module can't be built, torch's attention takes the kernels' place and the start says why.

Triton and the C compiler are real. libcuda is a stub, whose functions all return 0.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

from bass_core import RequestError
from bass_core.machine import gpu_kernels
from bass_core.model.attention import choose_backend
from kernels import support
from tests.support import ROOT

CUDA = torch.device("cuda", 0)
NO_LIBRARY = "libcuda.so cannot found!\nPlease make sure GPU is set up"
NO_HEADER = CalledProcessError(1, ["gcc", "driver.c", "-I/nowhere"])
OTHER = CalledProcessError(2, ["gcc", "driver.c"])
HIDE_HEADER = """
import sysconfig
paths = sysconfig.get_paths()
sysconfig.get_paths = lambda *_, **__: {**paths, "include": "/nowhere"}
"""
ASK = """
import torch
from kernels.support import _why_no_driver
torch.cuda.is_available = lambda: True
print(_why_no_driver())
"""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate an H100 with Triton and a C compiler, and return a function that sets the driver module's error."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    caches = (support.why_unavailable, support._why_no_driver)

    def set_error(error: Exception | None) -> None:
        class Driver:
            @property
            def active(self) -> Any:
                if error is not None:
                    raise error
                return type("Active", (), {"utils": None})

        for cached in caches:
            cached.cache_clear()
        monkeypatch.setattr("triton.runtime.driver", Driver())

    yield set_error
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_HEADER, r"the C compiler finds no Python\.h \(install python3-dev"),
        (OTHER, r"gcc failed with status 2"),
        (AssertionError(NO_LIBRARY), r"ldconfig lists no libcuda\.so\.1 \(run ldconfig as root"),
        (RuntimeError("0 active drivers ([]). There should\nonly be one."), r"can't be loaded .*only be one\)"),
        (FileNotFoundError(2, "No such file", "/sbin/ldconfig"), r"FileNotFoundError.*/sbin/ldconfig"),
    ],
)
def test_without_its_driver_module_torch_attends(
    hopper: Any, caplog: pytest.LogCaptureFixture, error: Exception, words: str
) -> None:
    hopper(error)
    assert choose_backend("auto", CUDA, torch.float16) == "sdpa"
    with pytest.raises(
        RequestError, match=f'^attention="fused" can\'t run here: Triton.*{words}.*\\.$'
    ) as refusal:
        choose_backend("fused", CUDA, torch.float16)
    with caplog.at_level(logging.WARNING):
        gpu_kernels.prepare(CUDA, lambda: pytest.fail("compiled ahead"))
    (sentence,) = caplog.messages
    assert re.search(f"torch's attention and products run: Triton.*{words}", sentence)
    assert not any("\n" in text for text in (sentence, str(refusal.value)))


def test_the_driver_module_is_tried_once_and_only_on_a_gpu(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(None)
    assert choose_backend("auto", CUDA, torch.float16) == "fused"
    monkeypatch.setattr("triton.runtime.driver", None)
    assert support.available(CUDA) and support.available(torch.device("cuda", 1))
    # On ZeroGPU there is none before the first request, and none is built.
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    support._why_no_driver.cache_clear()
    support.why_unavailable.cache_clear()
    assert support.available(CUDA)
    assert "need a CUDA device" in str(support.why_unavailable(torch.device("cpu")))
    assert support._why_no_driver.cache_info().misses == 0


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a libcuda.so.1 with all functions that Triton's driver module names, and one GPU."""
    triton = pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    folder = tmp_path_factory.mktemp("stub")
    source = Path(triton.__path__[0], "backends", "nvidia", "driver.c").read_text(encoding="utf-8")
    names = set(re.findall(r"\bcu[A-Z]\w+", source)) - {"cuDeviceGetCount"}
    functions = [f"int {name}() {{ return 0; }}" for name in sorted(names)]
    functions.append("int cuDeviceGetCount(int *count) { *count = 1; return 0; }")
    (folder / "stub.c").write_text("\n".join(functions))
    command = ["gcc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "stub.c", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "known", "words"),
    [
        ("", True, "None"),
        (HIDE_HEADER, True, "Triton can't launch kernels: the C compiler finds no Python.h"),
        ("", False, "Triton can't launch kernels: ldconfig lists no libcuda.so.1"),
    ],
)
def test_tritons_own_driver_module_is_built(
    stub: Path, tmp_path: Path, before: str, known: bool, words: str
) -> None:
    """A process that can load libcuda, but whose ldconfig may not know it."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "LD_PRELOAD": str(stub / "libcuda.so.1")}
    for name in ("TRITON_INTERPRET", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
        environment.pop(name, None)
    if known:
        environment["TRITON_LIBCUDA_PATH"] = str(stub)
    elif "libcuda.so.1" in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout:
        pytest.skip("this machine has libcuda")
    answer = subprocess.run(
        [sys.executable, "-c", before + ASK], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert answer.stdout.startswith(words), answer
