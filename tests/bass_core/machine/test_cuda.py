"""A GPU that this PyTorch can't use is refused or left alone in one sentence. CUDA is replaced by stubs.

The last test needs a PyTorch with CUDA, but no GPU: only the driver is a stub.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bass_core import RequestError
from bass_core.machine import cuda
from bass_core.model.loading.catalogue import pick_device
from tests.support import ROOT

# The errors of c10/cuda in torch 2.13 and 2.14.
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by "
    "downloading and installing a new\nversion from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
)
NO_GPU = "No CUDA GPUs are available"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaError'"
CUDA_13 = ("the NVIDIA driver is too old for this PyTorch, which is built for CUDA 13.0", "580", cuda.OLD_BUILDS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a build of PyTorch and one GPU, which fails at the start or in a kernel."""

    def install(build: str | None = "13.0", start: str = "", kernel: str = "") -> None:
        def fail(message: str) -> None:
            if message:
                raise RuntimeError(message)

        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "init", lambda: fail(start))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # NVML counts under any driver
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
        monkeypatch.setattr(cuda, "_try_kernel", lambda device: fail(kernel))

    return install


@pytest.mark.parametrize(
    ("build", "start", "kernel", "words"),
    [
        ("13.0", TOO_OLD, "", (*CUDA_13, "it supports CUDA 12.4")),
        ("13.0", TOO_OLD.replace("found version 12040", "found version"), "", CUDA_13),
        ("12.6", TOO_OLD, "", ("built for CUDA 12.6", "install a newer driver")),
        ("13.0", NO_DRIVER, "", ("no NVIDIA driver", "docker run --gpus all")),
        ("13.0", NO_GPU, "", ("shows no GPU", "CUDA_VISIBLE_DEVICES")),
        ("13.0", "", NO_KERNEL, ("no kernels for Tesla V100 (compute capability 7.0)", cuda.OLD_BUILDS)),
        ("13.0", "", "CUDA error: out of memory\nmore", ("(CUDA error: out of memory)", "nvidia-smi")),
        ("13.0", "", "\n", ("CUDA does not start", "nvidia-smi")),
        (None, "", "", ("built without CUDA", "install a build with CUDA")),
    ],
)
def test_an_unusable_gpu_is_refused_by_name_and_explained_by_auto(
    gpu: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    build: str,
    start: str,
    kernel: str,
    words: tuple[str],
) -> None:
    gpu(build, start, kernel)
    with pytest.raises(RequestError, match=r"'cuda' can't be used: .*; or choose the device cpu\.$") as refusal:
        pick_device("cuda")
    with caplog.at_level(logging.WARNING):
        assert pick_device("auto") == torch.device("cpu")
    # A computer without a GPU and a PyTorch for CPUs needs no explanation.
    assert len(caplog.messages) == (build is not None)
    for sentence in (str(refusal.value), *caplog.messages):
        assert all(word in sentence for word in words) and "\n" not in sentence


def test_a_usable_gpu_is_chosen_without_a_word(gpu: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    gpu()
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(
        RequestError, match=re.escape("'cuda:1' can't be used: PyTorch sees 1 CUDA device on this")
    ):
        pick_device("cuda:1")
    assert not caplog.messages


def test_a_gpu_beside_a_pytorch_for_cpus_is_mentioned(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(build=None)
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetCount", lambda: 1)
    assert pick_device("auto") == torch.device("cpu")
    assert "run on the CPU: this PyTorch" in caplog.text and "is built without CUDA" in caplog.text


def test_zero_gpu_tries_no_kernel(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no device before the first request."""
    gpu(start=NO_GPU)
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")


# Everything that CUDA's runtime asks a driver for CUDA 12.4.
OLD_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return (*function = dlsym(RTLD_DEFAULT, name)) == 0;
}
"""
ASK = "import torch; from bass_core.machine import cuda; print(cuda.why_unusable(torch.device('cuda')))"


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA")
@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (OLD_DRIVER, f"^{CUDA_13[0][:-3]}.*supports CUDA 12.4.*: install driver 580"),
        ("", "^PyTorch finds no NVIDIA driver"),
    ],
)
def test_torchs_own_errors_are_explained(driver: str, words: str, tmp_path: Path) -> None:
    environment = {**os.environ}
    if driver:
        if shutil.which("gcc") is None:
            pytest.skip("there is no gcc")
        (tmp_path / "driver.c").write_text(driver)
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "driver.c", "-o", "libcuda.so.1", "-ldl"]
        subprocess.run(command, cwd=tmp_path, check=True)
        environment["LD_PRELOAD"] = str(tmp_path / "libcuda.so.1")
    elif "libcuda.so.1" in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout:
        pytest.skip("this machine has a driver")
    answer = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert re.search(words, answer.stdout), answer
