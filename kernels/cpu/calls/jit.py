"""How the CPU's kernels are compiled: by numba, once for each kind of CPU, and kept on disk.

Contract: `kernel` compiles a function at its first call, without the interpreter's lock. The compiled code is kept
in `folder` (a program may set it before it imports the kernels), below a name that changes with the sources of
this package and with numba's version: numba itself looks only at the file of the function that is called, not at
those that it calls. A folder that can't be written, or code that can't be read, only costs compiling again.
Kernels start no threads (pool.py does), so numba's threading layers are never used.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import get_host_cpu_name
from numba.core import event as events
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import get_host_cpu_features

config: Any = numba.config
_F = TypeVar("_F", bound=Callable[..., Any])
folder = Path(__file__).parents[1] / "__pycache__"
# Other versions' code is removed if nobody has used it for so many days.
_KEPT_DAYS = 30
# Linux's arch_prctl, its request for a permission, and the permission to use AMX's tiles
# (Documentation/arch/x86/xstate).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# Compiled functions live as long as the process: their addresses are in packed weights.
_kept: list[Any] = []
_lock = threading.Lock()


class _Code(FunctionCache):
    """Numba's cache of a function on disk, which also survives damaged files."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception:  # a file that was cut off fails in many ways
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(Exception):  # a full disk
            super().save_overload(*arguments)


def kernel(function: _F) -> _F:
    """A compiled function, kept on disk. Sums are never reordered, and the lock is released while it runs."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    _keep(compiled, function)
    return cast(_F, compiled)


def helper(function: _F) -> _F:
    """A function that is compiled into each kernel that calls it.

    Python must not call it: it has no way in from there, which would take a quarter of the compiler's time.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # not in numba's own types
    return cast(_F, numba.njit(error_model="numpy", **options)(function))


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """The address of a function compiled for other kernels to call; compiled at once, and kept on disk."""
    compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
    _keep(compiled, function)
    compiled.compile()
    _kept.append(compiled)
    return int(compiled.address)


def _keep(compiled: Any, function: Callable[..., Any]) -> None:
    """Keep a function's code on disk, if some folder can be written."""
    own = str(_versions_folder(folder))
    with _lock:  # weights are packed, and their products compiled, by several threads
        before, config.CACHE_DIR = config.CACHE_DIR, own
        try:
            code = _Code(function)
        except RuntimeError:  # no folder at all can be written
            return
        finally:
            config.CACHE_DIR = before
    if code.cache_path.startswith(own):  # else numba chose another folder, where versions are not told apart
        compiled._cache = code


@cache
def _versions_folder(parent: Path) -> Path:
    """Where this version's code is kept; its time says when it was last used. Others' old code is removed."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    version = f"{zlib.crc32(b''.join(file.read_bytes() for file in sources)):08x}"
    # Code that uses tiles kills a process that may not, on the same CPU.
    own = parent / f"{version}-numba-{numba.__version__}{'-tiles' if has_tiles() else ''}"
    with suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own)
        for other in parent.glob("????????-numba-*"):
            if other.stat().st_mtime < time.time() - 86_400 * _KEPT_DAYS:
                shutil.rmtree(other, ignore_errors=True)
    return own


@contextmanager
def watched(bar: Callable[[], Any]) -> Iterator[None]:
    """Make a progress bar when a function begins to be compiled in this block, and update it for each function."""
    watcher = _Watcher(bar)
    try:
        with events.install_listener("numba:compile", watcher):
            yield
    finally:
        if watcher.bar is not None:
            watcher.bar.close()


class _Watcher(events.Listener):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.bar = make, None

    def on_start(self, event: Any) -> None:
        self.bar = self.make() if self.bar is None else self.bar

    def on_end(self, event: Any) -> None:
        if self.bar is not None:
            self.bar.update()


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what numba compiles for: of what this CPU can do, such as avx512f, unless NUMBA_CPU_FEATURES
    or NUMBA_ENABLE_AVX say otherwise."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    named = [one.strip() for one in features.split(",")]
    return frozenset(one[1:] for one in named if one.startswith("+"))


@cache
def cpu_name() -> str:
    """LLVM's name of the CPU that numba compiles for, such as znver4, unless NUMBA_CPU_NAME says otherwise."""
    return str(get_host_cpu_name() if config.CPU_NAME is None else config.CPU_NAME)


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 tiles (AMX) and this process may use them.

    The first call asks Linux for the permission, which holds for all threads of the process and for its forks.
    Without it the first tile instruction kills the process. BASS_TILES=0 leaves them off.
    """
    if os.environ.get("BASS_TILES") == "0" or not {"amx-bf16", "avx512bf16"} <= cpu_features():
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
