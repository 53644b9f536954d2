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

_lock = threading.Lock()
_processes: dict[str, subprocess.Popen[str]] = {}
_mark: Path | None = None


def start(dtype: str) -> None:
    """Start to compile for weights of a dtype, unless that is done, under way, or would not be faster.

    It would not be on a single core, and not if the code can't be kept on disk.
    """
    global _mark
    with _lock:
        if dtype not in FORMS or _processes or _cores() < 2:
            return
        folder = jit.compiled_folder()
        _mark = folder / f"{'-'.join(FORMS[dtype])}.complete"
        if not _mark.exists() and os.access(folder, os.W_OK):
            with suppress(OSError):  # no process can be started
                for part in ALL:
                    _processes[part] = _start(part, FORMS[dtype])


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
            reader.join()
        for part, process in waited.items():
            if process.wait() != 0:
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
        f"import gc, os, sys, types; gc.disable(); {niceness} and os.nice({niceness}); "
        f"sys.modules[{top!r}] = top = types.ModuleType({top!r}); top.__path__ = [{path!r}]; "
        f"from {package}.ahead import main; main({part!r}, {forms!r})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True
    )


def _read(process: subprocess.Popen[str], bar: Any) -> None:
    for _ in process.stdout or ():
        bar.update()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
