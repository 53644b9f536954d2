"""How the CPU's kernels are compiled: by numba, once for each kind of CPU, and cached on disk.

`kernel` compiles a function at its first call and releases the interpreter's lock while it runs. Compiled code is
cached in `folder`, which a program may set before it imports the kernels, under a name that changes with the
sources of this package, numba's version and settings, and the CPU. (numba itself checks only the file of the
called function, not those of the functions that it calls.) The name does not depend on where the sources are, so
two copies of them share their code. If the folder can't be written or code can't be read, the kernels are compiled
again. Kernels start no threads (pool.py does), so numba's threading layers are never used.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import get_host_cpu_name
from numba.core import event as events
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import get_host_cpu_features

from ...user_cache import cache_root

config: Any = numba.config
_F = TypeVar("_F", bound=Callable[..., Any])
_SOURCES = Path(__file__).parents[1]
# Other versions' code is removed if nobody has used it for this many days.
_MAX_UNUSED_DAYS = 30
# Linux's arch_prctl, its request for a permission, and the permission to use AMX's tiles
# (Documentation/arch/x86/xstate).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# Keeps compiled functions alive until the process ends: their addresses are in packed weights.
_compiled_functions: list[Any] = []


def _default_folder() -> Path:
    """Return a folder in the user's cache, or among the sources if that can't be written."""
    root = cache_root()
    if root is not None:
        with suppress(OSError):
            (root / "compiled").mkdir(parents=True, exist_ok=True)
            if os.access(root / "compiled", os.W_OK):
                return root / "compiled"
    return _SOURCES / "__pycache__"


folder = _default_folder()


class _Locator(_CacheLocator):
    """Tells numba where a function's code is: in the folder of these sources, so there is no stamp to compare."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        module = "-".join(Path(file).relative_to(_SOURCES).with_suffix("").parts)
        self._py_file, self._name = file, f"{module}-{function.__code__.co_firstlineno}"

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function, file)

    def get_cache_path(self) -> str:
        return str(compiled_folder())

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return self._name


class _Results(CompileResultCacheImpl):
    _locator_classes: list[Any] = [_Locator]  # noqa: RUF012 (numba declares no class variable)


class _Code(FunctionCache):
    """Numba's cache of a function on disk, which also survives damaged files and a full or read-only disk."""

    _impl_class = _Results

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception:  # a file that was cut off fails in many ways
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(Exception):
            super().save_overload(*arguments)


def kernel(function: _F) -> _F:
    """Return a function that is compiled at its first call, cached on disk, and releases the interpreter's lock.

    Sums are never reordered.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    _cache_on_disk(compiled, function)
    return cast(_F, compiled)


def helper(function: _F) -> _F:
    """Return a function that is compiled into each kernel that calls it.

    Python can't call it: the entry point for that would take a quarter of the compile time.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # not in numba's type hints
    return cast(_F, numba.njit(error_model="numpy", **options)(function))


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """Compile a function at once, cached on disk, and return the address by which other kernels call it."""
    compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
    _cache_on_disk(compiled, function)
    compiled.compile()
    _compiled_functions.append(compiled)
    return int(compiled.address)


def _cache_on_disk(compiled: Any, function: Callable[..., Any]) -> None:
    """Cache a function's code on disk, if its source is among those that name the folder."""
    if Path(function.__code__.co_filename).is_relative_to(_SOURCES):
        compiled._cache = _Code(function)


def compiled_folder() -> Path:
    """Return the folder of this version's code, in `folder`."""
    return _versions_folder(folder)


@cache
def _versions_folder(parent: Path) -> Path:
    """Return the folder of this version's code, and remove other versions' old code.

    The folder's modification time is the time of its last use. Each kind of CPU has a separate folder, because
    machines that share a home would overwrite each other's files. So does code with tiles, which kills a process
    without the permission even on the same CPU.
    """
    settings = f"{config.OPT} {config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}"
    version = hashlib.sha256(f"{__package__} {cpu_name()} {sorted(cpu_features())} {settings}".encode())
    # Compiled code contains constants of kernels/plan.py.
    for file in sorted([*_SOURCES.rglob("*.py"), _SOURCES.parent / "plan.py"]):
        version.update(file.relative_to(_SOURCES.parent).as_posix().encode() + b"\0" + file.read_bytes())
    tiles = "-tiles" if has_tiles() else ""
    own_folder = parent / f"{version.hexdigest()[:16]}-numba-{numba.__version__}{tiles}"
    with suppress(OSError):
        own_folder.mkdir(parents=True, exist_ok=True)
        os.utime(own_folder)
        for other in parent.glob("*-numba-*"):
            if other.stat().st_mtime < time.time() - 86_400 * _MAX_UNUSED_DAYS:
                shutil.rmtree(other, ignore_errors=True)
    return own_folder


@contextmanager
def watched(bar: Callable[[], Any]) -> Iterator[None]:
    """Create a progress bar when the first function is compiled in this block, and update it for each function.

    Python collects no garbage during the block: the compiler makes millions of small objects, and looking through
    them would take a third of its time.
    """
    watcher, collects = _Watcher(bar), gc.isenabled()
    gc.disable()
    try:
        with events.install_listener("numba:compile", watcher):
            yield
    finally:
        if collects:
            gc.enable()
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
    """Return LLVM's names of the CPU features that numba compiles for, e.g. avx512f.

    These are the features of this CPU, unless NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX override them.
    """
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    signed_names = [name.strip() for name in features.split(",")]
    return frozenset(name[1:] for name in signed_names if name.startswith("+"))


@cache
def cpu_name() -> str:
    """Return LLVM's name of the CPU that numba compiles for, e.g. znver4; NUMBA_CPU_NAME overrides it."""
    return str(get_host_cpu_name() if config.CPU_NAME is None else config.CPU_NAME)


@cache
def has_tiles() -> bool:
    """Return whether this CPU multiplies bfloat16 tiles (AMX) and this process may use them.

    The first call asks Linux for the permission, which holds for all threads of the process and for its forks.
    Without the permission, the first tile instruction kills the process. BASS_TILES=0 disables tiles.
    """
    if os.environ.get("BASS_TILES") == "0" or not {"amx-bf16", "avx512bf16"} <= cpu_features():
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
