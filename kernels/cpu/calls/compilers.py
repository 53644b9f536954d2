"""Compile a model's kernels in two processes, while this one fetches weights and imports libraries.

Call `start` as early as possible, and `finish` before the first kernel is used. The code comes to this process
through numba's cache on disk. Whatever the processes leave undone is compiled here, so nothing depends on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
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
PARTS = ("forward", "rest")
# How many functions both parts compile for bfloat16, for the progress bar; other dtypes differ by a few.
FUNCTIONS = 226

_lock = threading.Lock()
_processes: list[subprocess.Popen[str]] = []
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
                for part in PARTS:
                    _processes.append(_start(part, FORMS[dtype]))


def finish(bar: Callable[[int], Any]) -> None:
    """Wait for the processes that `start` has started, if any.

    Args:
        bar: makes a progress bar for a number of functions.
    """
    with _lock:
        if not _processes:
            return
        shown = bar(FUNCTIONS)
        readers = [threading.Thread(target=_read, args=(process, shown), daemon=True) for process in _processes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        succeeded = [process.wait() == 0 for process in _processes]
        _processes.clear()
        shown.close()
        if all(succeeded) and _mark is not None:
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
    code = (
        f"import sys, types; sys.modules[{top!r}] = top = types.ModuleType({top!r}); top.__path__ = [{path!r}]; "
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
