"""Decide whether the compiled CPU kernels (kernels/cpu) can be used.

Call `available` before importing anything from kernels/cpu. BASS_CPU_KERNELS=0 turns the kernels off; then
transformers' own models run, with one log line. Only the first start compiles. It compiles everything that later
calls need: `compile_ahead` starts processes for it; `compiling` waits for those that a load needs, compiles the
rest, and shows a progress line; `finish_compiling` does the same before a request.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from tqdm import tqdm

from kernels.support import is_accelerator

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


def compile_ahead(dtype: str) -> None:
    """Start to compile the kernels for weights of a dtype ("bfloat16", "int4", ...), unless that has been done."""
    if available():
        from kernels.cpu.calls import compilers

        compilers.start(dtype)


@contextmanager
def compiling(device: torch.device, *, everything: bool = False) -> Iterator[None]:
    """Show one progress line for all compilations: those in the block, then those of the sampling kernels.

    The latter are left to `finish_compiling` if a process still compiles them, unless `everything` is asked for.
    """
    if is_accelerator(device) or why_unavailable() is not None:
        yield
        return
    from kernels.cpu.calls import compilers, jit

    def bar(total: int | None = None) -> Any:
        return tqdm(total=total, desc="Compiling the CPU's kernels, once", unit=" functions")

    compilers.finish(bar, compilers.ALL if everything else compilers.FIRST)
    from kernels.cpu.sampling import calls

    with jit.watched(bar):
        yield
        if not compilers.running():
            calls.compile_all()


def finish_compiling(device: torch.device) -> None:
    """Wait until all kernels are compiled, and load them."""
    if not is_accelerator(device) and why_unavailable() is None:
        from kernels.cpu.calls import compilers

        if compilers.running():
            with compiling(device, everything=True):
                pass
