"""Compile a model's kernels in other processes, while this one fetches weights and imports libraries.

Call `start` as early as possible, `finish` before the first kernel is used, and `finish` with ALL before the first
request. The code comes to this process through numba's cache on disk. Whatever the processes leave undone is
compiled here, so nothing depends on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import jit

# By the dtype of the weights: the formats that a target, its embedding and a draft head have (kinds.py).
FORMS = {
    "bfloat16": ("bfloat16", "int8"),
    "float16": ("float16", "int8"),
    "int8": ("int8", "bfloat16"),
    "int4": ("q4_1", "q8_0", "int8", "bfloat16"),
}
# How many functions each part (kernels/cpu/ahead.py) compiles for bfloat16, for the progress bar; other dtypes
# differ by a few.
FUNCTIONS = {"forward": 86, "rest": 64, "sampling": 75}
ALL = tuple(FUNCTIONS)
# A load needs these parts. The others are compiled at low priority until a request needs them.
FIRST = ("forward", "rest")

# A process that takes longer, in seconds, is ended.
_LIMIT_S = 600.0
# Set in the processes, so that a program that is not Python's interpreter can't start itself again and again.
_VARIABLE = "BASS_COMPILING"

_lock = threading.Lock()
_processes: dict[str, subprocess.Popen[str]] = {}
_mark: Path | None = None


def _renew() -> None:
    """Forget the parent's processes and lock in a fork, which can't wait for them."""
    global _lock, _mark
    _lock, _mark = threading.Lock(), None
    _processes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def start(dtype: str) -> None:
    """Start to compile for weights of a dtype.

    Do nothing if it is done or running, on a single core, if the kernels are off, or in a read-only folder.
    """
    global _mark
    off = os.environ.get("BASS_CPU_KERNELS") == "0" or jit.config.DISABLE_JIT
    if off or not sys.executable or getattr(sys, "frozen", False) or _VARIABLE in os.environ:
        return
    with _lock:
        if dtype not in FORMS or _processes or _cores() < 2:
            return
        folder = jit.compiled_folder()
        _mark = folder / f"{'-'.join(FORMS[dtype])}.complete"
        if not _mark.exists() and os.access(folder, os.W_OK):
            try:
                for part in ALL:
                    _processes[part] = _start(part, FORMS[dtype])
            except OSError:  # no more processes can be started
                _mark = None


def running() -> bool:
    """Return whether processes have been started that `finish` has not waited for yet."""
    return bool(_processes)


def finish(bar: Callable[[int], Any], parts: Sequence[str] = FIRST) -> None:
    """Wait for the processes of these parts, if `start` has started them.

    Args:
        bar: makes a progress bar for a number of functions.
    """
    global _mark
    with _lock:
        waited = {part: _processes[part] for part in parts if part in _processes}
        if not waited:
            return
        shown = bar(sum(FUNCTIONS[part] for part in waited))
        readers = [
            threading.Thread(target=_read, args=(process, shown), daemon=True) for process in waited.values()
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(_LIMIT_S)
        for part, process in waited.items():
            if _ended(process) != 0:
                _mark = None
            del _processes[part]
        shown.close()
        if not _processes and _mark is not None:
            with suppress(OSError):
                _mark.touch()


def _start(part: str, forms: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the process for a part (kernels/cpu/ahead.py).

    In a wheel, the kernels are inside bass_core, whose import takes seconds. So the process gets an empty module
    in place of the outermost package.
    """
    package = jit.__name__.rsplit(".", 2)[0]
    top, depth = package.partition(".")[0], package.count(".")
    path = str(Path(jit.__file__).parents[1 + depth])
    # A higher number would starve it, and the first request, on a busy machine.
    niceness = 0 if part in FIRST or not hasattr(os, "nice") else 10
    code = (
        # Only from this process's path: without it, Python would look in the current folder first.
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"import gc, os, types; gc.disable(); {niceness} and os.nice({niceness}); "
        f"sys.modules[{top!r}] = top = types.ModuleType({top!r}); top.__path__ = [{path!r}]; "
        f"from {package}.ahead import main; main({part!r}, {forms!r})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _VARIABLE: "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True
    )


def _ended(process: subprocess.Popen[str]) -> int:
    """Return the exit status of a process whose output has ended; end it first if it has not."""
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(process: subprocess.Popen[str], bar: Any) -> None:
    for _ in process.stdout or ():
        bar.update()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
