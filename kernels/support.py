"""Whether Triton kernels can run on a device, and what their launches need to know about it.

Contract: importing this imports no triton; `obstacle` says in one sentence why kernels can't run, or None.
On a CPU they run under Triton's interpreter alone: slowly, for tests (TRITON_INTERPRET=1, set before the start).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

# Programs that a launch spreads a problem over where the number of multiprocessors is not known.
_FALLBACK_PROCESSORS = 4


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def widens(dtype: torch.dtype) -> bool:
    """Whether products are made of float32 copies: the interpreter multiplies bfloat16's bits as integers."""
    return dtype == torch.bfloat16 and interpreting()


def obstacle(device: torch.device) -> str | None:
    """Why Triton kernels can't run on the device, or None where they can."""
    if find_spec("triton") is None:
        return "Triton is not installed here (pip install triton, Linux only)"
    if interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is for CPU tensors: unset it to use the GPU"
    if device.type != "cuda":
        return "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, which is slow)"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "Triton kernels need a GPU of compute capability 7.5 or newer"
    return None


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number on a CPU."""
    if device.type != "cuda":
        return _FALLBACK_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take on the device; 99 KiB, what most have, where it is not known."""
    if device.type != "cuda":
        return 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or 99 * 1024)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device the current one: Triton launches there, whatever tensors it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
