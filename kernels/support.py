"""Find out whether Triton kernels can run on a device, and what their launches need to know about it.

Importing this module does not import triton. Call `why_unavailable` first: it returns one sentence that says why
kernels can't run, or None. On a CPU, kernels run only under Triton's interpreter, which is slow and meant for
tests (set TRITON_INTERPRET=1 before the program starts).
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import torch

from .shapes import Card

# Number of multiprocessors to assume for a device that is not a CUDA GPU.
_FALLBACK_PROCESSORS = 4
# The card to compile for when tensors are on torch's device "meta". Launches for this card are compiled but never
# run.
_described: Card | None = None
# Signals that end a compiler for reasons outside the launch: Ctrl-C, out of memory, a request to terminate.
PASSING_SIGNALS = (2, 9, 15)


class CompileFailed(RuntimeError):
    """Raised for a launch that Triton could not compile at startup; the caller uses other tile sizes, or torch."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device runs asynchronously to the host, so that reading a value waits for queued work."""
    return device.type != "cpu"


def runtime(device: torch.device) -> Any:
    """Return torch's module for the device's streams, events, graphs and memory.

    For a CUDA device this is torch.cuda.
    """
    return torch.get_device_module(device)


def interpreting() -> bool:
    """Return whether kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def set_meta_card(card: Card | None) -> None:
    """Compile for `card` when tensors are on the device "meta"; None ends this.

    No GPU is needed to compile.
    """
    global _described
    _described = card
    for cached_function in (why_unavailable, processors, shared_bytes):
        cached_function.cache_clear()


def _described_card(device: torch.device) -> Card | None:
    return _described if device.type == "meta" else None


def card_of(device: torch.device) -> Card:
    """Return the card of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return Card(10 * major + minor, shared_bytes(device), processors(device))


def needs_float32(dtype: torch.dtype) -> bool:
    """Return whether products need float32 copies of their operands.

    Triton's interpreter multiplies the bits of bfloat16 numbers as integers, so it needs them.
    """
    return dtype == torch.bfloat16 and interpreting()


@cache
def why_unavailable(device: torch.device) -> str | None:
    """Return why Triton kernels can't run on the device, or None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed here (pip install triton, Linux only)"
    if _described_card(device) is not None:
        return None
    if interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is for CPU tensors: unset it to use the GPU"
    if device.type != "cuda":
        return "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, which is slow)"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "Triton kernels need a GPU of compute capability 7.5 or newer"
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton builds its launcher with a C compiler: install gcc or clang, or name one in CC"
    # On ZeroGPU there is no driver before the first request.
    return None if on_zero_gpu() else _why_no_driver()


@cache
def _why_no_driver() -> str | None:
    """Build and load Triton's driver module, as the first launch would, and return why that fails, or None.

    The module is a C file, whose compilation needs Python.h and libcuda. It stays in Triton's cache.
    """
    try:
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  builds it
    except Exception as error:  # it runs ldconfig and a compiler, and imports the result
        return f"Triton can't launch kernels: {_driver_failure(error)}"
    return None


def _driver_failure(error: Exception) -> str:
    """Explain why Triton's driver module can't be built or loaded."""
    if isinstance(error, CalledProcessError) and not isinstance(error.cmd, str):
        folders = [part[2:] for part in error.cmd if part.startswith("-I")]
        if folders and not any(Path(folder, "Python.h").exists() for folder in folders):
            return "the C compiler finds no Python.h (install python3-dev or python3-devel)"
        return f"{error.cmd[0]} failed with status {error.returncode} (its own message is above)"
    message = " ".join(str(error).split())
    if "libcuda.so" in message:
        return "ldconfig lists no libcuda.so.1 (run ldconfig as root, or name its folder in TRITON_LIBCUDA_PATH)"
    return f"its driver module can't be loaded ({type(error).__name__}: {message[:200].rstrip('.')})"


def available(device: torch.device) -> bool:
    """Return whether Triton kernels can run on the device."""
    return why_unavailable(device) is None


def on_zero_gpu() -> bool:
    """Return whether this is a Hugging Face Space on ZeroGPU, which has a device only while it answers a request.

    While the Space has no device, its CUDA tensors are placeholders whose values are on the host. A forked process
    moves them to the device (read in the source of spaces 0.51.3; not run on a Space).
    """
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def capability(device: torch.device) -> int:
    """Return the device's compute capability, e.g. 90; 80 under the interpreter and on devices other than CUDA."""
    if (card := _described_card(device)) is not None:
        return card.capability
    if interpreting() or device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether Triton's products use tensor cores; below compute capability 8.0 it emits multiply-adds."""
    return capability(device) >= 80


@cache
def processors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; on a CPU a small number."""
    if (card := _described_card(device)) is not None:
        return card.processors
    if device.type != "cuda":
        return _FALLBACK_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use on the device.

    If the number is unknown, return 99 KiB, which most GPUs have.
    """
    if (card := _described_card(device)) is not None:
        return card.shared
    if device.type != "cuda":
        return 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or 99 * 1024)


def new_stream(device: torch.device) -> AbstractContextManager[object]:
    """Enter a new stream that first waits for the work queued on this thread's stream; do nothing on a CPU.

    A new thread starts on the default stream, where models and caches are usually created.
    """
    if not is_accelerator(device):
        return nullcontext()
    stream = runtime(device).Stream(device)
    stream.wait_stream(runtime(device).current_stream(device))
    return runtime(device).stream(stream)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current: Triton launches on the current device, wherever its tensors are."""
    return runtime(device).device(device) if is_accelerator(device) else nullcontext()
