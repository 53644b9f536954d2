"""Decide whether the compiled CPU kernels (kernels/cpu) can be used.

Call `available` before importing anything from kernels/cpu. The first call of `available` also sets the folder for
compiled code, next to the cached weights. BASS_CPU_KERNELS=0 turns the kernels off; transformers' own models then
run, with one log line. `compiling` shows a progress line if anything is compiled. Only the first start compiles;
it compiles everything that later calls need.
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
    """Return why the kernels can't be used, as a clause, or None if they can."""
    if os.environ.get("BASS_CPU_KERNELS") == "0":
        return "BASS_CPU_KERNELS is 0"
    try:
        from kernels.cpu.calls import jit
    except Exception as error:  # a numba that doesn't fit this Python, numpy or system fails in many ways
        return f"numba can't be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    if jit.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is 1"
    missing = sorted({"fma", "f16c"} - jit.cpu_features())
    if platform.machine().lower() in ("x86_64", "amd64") and missing:
        return f"this CPU has no {' or '.join(missing)}"
    jit.folder = _compiled_folder() or jit.folder
    return None


@cache
def available() -> bool:
    """Return whether the compiled kernels can be used."""
    reason = why_unavailable()
    if reason is not None:
        _log.warning("The CPU's own kernels are off, so transformers' own models run: %s.", reason)
    return reason is None


def has_tiles() -> bool:
    """Return whether the kernels multiply bfloat16 with AMX tiles."""
    if why_unavailable() is not None:
        return False
    from kernels.cpu.calls import jit

    return jit.has_tiles()


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Show one progress line for all compilations: those in the block, then those of the sampling kernels."""
    if is_accelerator(device) or why_unavailable() is not None:
        yield
        return
    from kernels.cpu.calls import jit
    from kernels.cpu.sampling import calls

    with jit.watched(lambda: tqdm(desc="Compiling the CPU's kernels, once", unit=" functions")):
        yield
        calls.compile_all()


def _compiled_folder() -> Path | None:
    """Return the folder for compiled code, next to the weights, or None if it can't be written."""
    try:
        folder = cache_root() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, WeightsError):
        return None
    return folder if os.access(folder, os.W_OK) else None
