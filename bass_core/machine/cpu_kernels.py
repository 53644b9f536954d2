"""Whether the compiled kernels for the CPU (kernels/cpu) can be used here.

Contract: `available` is asked before anything of kernels/cpu is imported; the first time it says where compiled
code is kept, beside the weights. BASS_CPU_KERNELS=0 turns the kernels off. Without them transformers' own models
run, and the log says so once. `compiling` shows a progress line where something is compiled, which only a first
start does; after it nothing is compiled any more, whatever the lanes do.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from tqdm import tqdm

from kernels.support import is_accelerator

from ..errors import WeightsError
from .user_cache import cache_root

_log = logging.getLogger(__name__)


@cache
def why_unavailable() -> str | None:
    """Why the kernels can't be used, as a clause; None if they can."""
    if os.environ.get("BASS_CPU_KERNELS") == "0":
        return "BASS_CPU_KERNELS is 0"
    try:
        from kernels.cpu.calls import jit
    except Exception as error:  # a numba that doesn't fit this Python, numpy or system fails in many ways
        return f"numba can't be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    lacking = sorted({"fma", "f16c"} - jit.cpu_features())
    if platform.machine().lower() in ("x86_64", "amd64") and lacking:
        return f"this CPU has no {' or '.join(lacking)}"
    jit.folder = _folder() or jit.folder
    return None


@cache
def available() -> bool:
    """Whether the compiled kernels can be used."""
    reason = why_unavailable()
    if reason is not None:
        _log.warning("The CPU's own kernels are off, so transformers' own models run: %s.", reason)
    return reason is None


def has_tiles() -> bool:
    """Whether the kernels multiply bfloat16 by AMX's tiles."""
    if why_unavailable() is not None:
        return False
    from kernels.cpu.calls import jit

    return jit.has_tiles()


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Show what is compiled for a CPU, by the block that prepares models and for sampling, in one line."""
    if is_accelerator(device) or why_unavailable() is not None:
        yield
        return
    from kernels.cpu.calls import jit
    from kernels.cpu.sampling import calls

    with jit.watched(lambda: tqdm(desc="Compiling the CPU's kernels, once", unit=" functions")):
        yield
        calls.compile_all()


def _folder() -> Path | None:
    """Where compiled code is kept beside the weights; None if that can't be written."""
    try:
        folder = cache_root() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, WeightsError):
        return None
    return folder if os.access(folder, os.W_OK) else None
