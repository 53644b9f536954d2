"""Whether Triton kernels can run on a device, and what their launches need to know about it.

Contract: importing this module does not import triton. `why_unavailable` says in one sentence why kernels can't
run, or returns None. On a CPU they run only under Triton's interpreter (TRITON_INTERPRET=1, set before the program
starts): slowly, for tests.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from .shapes import Card

# Assumed number of multiprocessors where it is not known (on a CPU).
_FALLBACK_PROCESSORS = 4
# The card that torch's device "meta" stands for: launches for it are compiled, and never run.
_described: Card | None = None
# Signals that end a compiler for reasons that are not the launch's: Ctrl-C, want of memory, a request to end.
PASSING_SIGNALS = (2, 9, 15)


class LeftOut(RuntimeError):
    """A launch that Triton could not compile when the program started: it takes other sizes, or torch."""


def is_accelerator(device: torch.device) -> bool:
    """Whether the device runs asynchronously to the host: work is queued, and reading a value waits for it."""
    return device.type != "cpu"


def runtime(device: torch.device) -> Any:
    """torch's module for an accelerator's streams, events, graphs and memory: torch.cuda for a CUDA device."""
    return torch.get_device_module(device)


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def describe(card: Card | None) -> None:
    """Let tensors of the device "meta" stand for those of a card, for compiling without one; None: no longer."""
    global _described
    _described = card
    for known in (why_unavailable, processors, shared_bytes):
        known.cache_clear()


def _stands_for(device: torch.device) -> Card | None:
    return _described if device.type == "meta" else None


def card_of(device: torch.device) -> Card:
    """The card of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return Card(10 * major + minor, shared_bytes(device), processors(device))


def widens(dtype: torch.dtype) -> bool:
    """Whether to multiply float32 copies: Triton's interpreter multiplies the bits of bfloat16 as integers."""
    return dtype == torch.bfloat16 and interpreting()


@cache
def why_unavailable(device: torch.device) -> str | None:
    """Why Triton kernels can't run on the device; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed here (pip install triton, Linux only)"
    if _stands_for(device) is not None:
        return None
    if interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is for CPU tensors: unset it to use the GPU"
    if device.type != "cuda":
        return "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, which is slow)"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "Triton kernels need a GPU of compute capability 7.5 or newer"
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton builds its launcher with a C compiler: install gcc or clang, or name one in CC"
    return None


def available(device: torch.device) -> bool:
    """Whether Triton kernels can run on the device."""
    return why_unavailable(device) is None


def on_zero_gpu() -> bool:
    """Whether this is a Hugging Face Space on ZeroGPU, which has a device only while it answers a request.

    Until then its CUDA tensors are placeholders whose values are on the host. A forked process moves them to the
    device (read in the source of spaces 0.51.3; not run on a Space).
    """
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def has_tensor_cores(device: torch.device) -> bool:
    """Whether Triton's products use tensor cores on the device.

    Below compute capability 8.0 Triton emits plain multiply-adds. True for other devices than CUDA ones and under
    the interpreter: nothing depends on it there.
    """
    if (card := _stands_for(device)) is not None:
        return card.capability >= 80
    return interpreting() or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number on a CPU."""
    if (card := _stands_for(device)) is not None:
        return card.processors
    if device.type != "cuda":
        return _FALLBACK_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on the device; if unknown 99 KiB, which most GPUs have."""
    if (card := _stands_for(device)) is not None:
        return card.shared
    if device.type != "cuda":
        return 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or 99 * 1024)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A new stream on an accelerator that first waits for the work queued on this thread's stream; none on a CPU.

    The current stream of a new thread is the default stream, on which models and caches are usually made.
    """
    if not is_accelerator(device):
        return nullcontext()
    stream = runtime(device).Stream(device)
    stream.wait_stream(runtime(device).current_stream(device))
    return runtime(device).stream(stream)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one: Triton launches on the current device, wherever its tensors are."""
    return runtime(device).device(device) if is_accelerator(device) else nullcontext()
