"""How the CPU's kernels are compiled: by numba, once for each kind of CPU, and kept on disk.

Contract: `kernel` compiles a function at its first call, without the interpreter's lock. The compiled code is kept
in `folder` (a program sets it before it imports the kernels; by default numba's own place), below a name that
changes with the sources of this package and with numba's version: numba itself looks only at the file of the
function that is called, not at those that it calls. Kernels start no threads (pool.py does), so numba's threading
layers are never used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import config
from numba.core.codegen import get_host_cpu_features

_F = TypeVar("_F", bound=Callable[..., Any])
folder: Path | None = None
# Compiled functions live as long as the process: their addresses are in packed weights.
_kept: list[Any] = []


def kernel(function: _F) -> _F:
    """A compiled function, kept on disk. Sums are never reordered, and the lock is released while it runs."""
    with _own_folder():
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """The address of a function compiled for other kernels to call; compiled at once, and kept on disk."""
    with _own_folder():
        compiled: Any = numba.cfunc(signature, cache=True, error_model="numpy")(function)
    _kept.append(compiled)
    return int(compiled.address)


@contextmanager
def _own_folder() -> Iterator[None]:
    """Numba asks where to keep code when a function is decorated."""
    before = config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder / _version())
    try:
        yield
    finally:
        config.CACHE_DIR = before


def helper(function: _F) -> _F:
    """A function that is compiled into each kernel that calls it."""
    return numba.njit(inline="never", nogil=True, error_model="numpy")(function)


@cache
def _version() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return f"{zlib.crc32(b''.join(file.read_bytes() for file in sources)):08x}-numba-{numba.__version__}"


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what numba compiles for: of what this CPU can do, such as avx512f, unless NUMBA_CPU_FEATURES
    or NUMBA_ENABLE_AVX say otherwise."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    named = [one.strip() for one in features.split(",")]
    return frozenset(one[1:] for one in named if one.startswith("+"))
