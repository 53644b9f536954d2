"""Compile the GPU kernels (kernels/triton) ahead of time, in processes that may crash.

`prepare` compiles every launch that the models need on the device into Triton's own cache, so that no race
compiles. A launch is left out if its process crashes (a compiler assertion ends it), hangs or raises: a warning is
logged, and other sizes or torch take its place (kernels/triton/launch.py). The left-out launches are listed in
Triton's cache, so that the next start does not try them again. Failures that may pass, e.g. a full disk, are not
listed.

Nothing is raised here. BASS_COMPILE_AHEAD=0 turns this off, and so does ZeroGPU, where there is no device yet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels import support
from kernels.shapes import Card, Shape
from kernels.support import PASSING_SIGNALS, card_of, on_zero_gpu, why_unavailable

from .cpu import cores

# The package and folder of our kernels; in a wheel they are inside bass_core.
KERNELS = support.__name__.rpartition(".")[0] + ".triton"
SOURCES = Path(support.__file__).with_name("triton")
# The module that compiles, and the function that lists the launches of a shape. Tests pass other functions.
COMPILER_MODULE, LAUNCHES = f"{KERNELS}.ahead", f"{KERNELS}.needed:launches"
# Maximum number of processes that compile at once. Each compiles a share of the launches and takes about 0.5 GB.
MAX_PROCESSES = 4
# End a process after this many seconds without output; one launch takes one or two.
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


class TransientFailure(str):
    """The reason why a launch could not be compiled this time; the next start may succeed."""


def prepare(device: torch.device, shapes: Callable[[], list[Shape]]) -> None:
    """Compile the launches of models of these shapes on the device, unless an earlier start has compiled them.

    Without a CUDA device nothing is done and `shapes` is not called. If Triton can't run on it, a warning
    says why.
    """
    if device.type != "cuda" or on_zero_gpu():
        return
    if (reason := why_unavailable(device)) is not None:
        _log.warning("Our GPU kernels are off, so torch's attention and products run: %s.", reason)
    elif os.environ.get("BASS_COMPILE_AHEAD") != "0":
        leave_out(card_of(device), shapes())


def leave_out(card: Card, shapes: list[Shape], of: str = LAUNCHES) -> None:
    """Compile for a card, and keep this process from launching kernels that could not be compiled."""
    from kernels.triton.launch import left_out  # imports triton

    path = _file(card, shapes, of)
    failed = _read(path)
    if failed is None:
        failed = compile_all(card, shapes, of)
        if failed is None:
            return
        if not any(isinstance(reason, TransientFailure) for reason in failed.values()):
            _write(path, failed)
    for name, reason in failed.items():
        _log.warning("A GPU kernel was left out, other sizes or torch take its place (%s): %s", reason, name[:300])
    left_out.update(failed)


def compile_all(
    card: Card, shapes: list[Shape], of: str = LAUNCHES, only: list[str] | None = None
) -> dict[str, str] | None:
    """Compile all launches and, for each launch that fails, the launches that replace it.

    Args:
        only: the names of the launches to compile (for tests); None for all.

    Returns:
        The reasons of the launches that could not be compiled, by name; None if no process could start.
    """
    order: dict[str, Any] = {"card": asdict(card), "shapes": [asdict(shape) for shape in shapes], "of": of}
    count, failed, num_failed = max(1, min(cores(), MAX_PROCESSES)), dict[str, str](), -1
    while len(failed) > num_failed:
        num_failed = len(failed)
        order |= {"step": count, "left_out": list(failed), "only": only}
        bar = tqdm(desc="Compiling the GPU's kernels, once", unit=" variants")
        running = _Running()
        with bar, ThreadPoolExecutor(count) as pool:
            shares = [pool.submit(_share, order, start, bar, failed, running) for start in range(count)]
            try:
                finished = [share.result() for share in shares]
            except BaseException:  # Ctrl-C, which reaches only this process
                running.end()
                raise
        if not all(finished):
            return None
    return failed


class _Running:
    """The compiler processes that are running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self.ended = False

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a process in its own process group, so that its children end with it.

        Raises:
            _Died: if it can't be started.
        """
        with self._lock:
            if self.ended:
                raise _Died("the start was ended")
            try:
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise _Died(f"no process can be started ({error})") from error
            self._processes.add(process)
            return process

    def forget(self, process: subprocess.Popen[str]) -> None:
        """Forget a process that has ended, because its id may be reused."""
        with self._lock:
            self._processes.discard(process)

    def end(self) -> None:
        """End all processes, and let no more start."""
        with self._lock:
            self.ended = True
            for process in self._processes:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that nobody has waited for, and its children: a child (ptxas) would keep its pipe open."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _share(order: dict[str, Any], first: int, bar: Any, failed: dict[str, str], running: _Running) -> bool:
    """Compile every `step`-th launch from `first` on, in one process after another.

    Returns whether the end was reached.
    """
    launch: int | None = first
    while launch is not None:
        start, launch, name = launch, None, ""
        try:
            for line in _lines({**order, "first": start}, running):
                if "total" in line:
                    bar.total = line["total"]
                elif "name" in line:
                    launch, name = line["at"], line["name"]
                elif "error" in line:
                    launch = None
                    bar.update()
                    if line["error"] is not None:
                        failed[name] = TransientFailure(line["error"]) if line["passing"] else line["error"]
        except _Died as error:
            if running.ended:
                return False
            if launch is None:
                # It died between two launches or before the first, so we don't know which launch to leave out.
                _log.warning("The GPU's kernels can't be compiled ahead: %s.", error)
                return False
            failed[name] = TransientFailure(error) if error.passing else str(error)
            bar.update()
            launch += order["step"]
    return True


class _Died(Exception):
    """A process ended before its work was done, as the message explains. `passing`: a new try may succeed."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


def _lines(order: dict[str, Any], running: _Running) -> Iterator[dict[str, Any]]:
    """Yield the lines that a process prints; raise _Died if it ended early."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    # Hide the device, so that no process takes memory there.
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    hung = threading.Event()
    with running.start([sys.executable, "-m", COMPILER_MODULE, json.dumps(order)], environment) as process:
        timer = _start_timer(process, hung)
        try:
            for line in process.stdout or ():
                timer.cancel()
                with suppress(ValueError):  # other output of a library
                    yield json.loads(line)
                timer = _start_timer(process, hung)
        finally:
            timer.cancel()
            running.forget(process)
            _kill(process)
    if hung.is_set():
        raise _Died(f"the compiler printed nothing for {PATIENCE_S:g} s")
    if code := process.returncode:
        message = f"signal {-code} ended the compiler" if code < 0 else f"the compiler ended with status {code}"
        raise _Died(message, -code in PASSING_SIGNALS)


def _start_timer(process: subprocess.Popen[str], hung: threading.Event) -> threading.Timer:
    def end() -> None:
        hung.set()
        _kill(process)

    timer = threading.Timer(PATIENCE_S, end)
    timer.daemon = True
    timer.start()
    return timer


def _cache() -> Path:
    """Return the folder that Triton compiles into."""
    import triton

    with suppress(AttributeError):  # before Triton 3.4
        return Path(triton.knobs.cache.dir)
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _file(card: Card, shapes: list[Shape], of: str) -> Path:
    """Return the file, next to the compiled code, with the result for these kernels, this Triton and this card."""
    import triton

    facts = [triton.__version__, of, str(card), str(shapes)]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for source in sorted(SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    return _cache() / f"bass-{digest.hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, str] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) else None


def _write(path: Path, failed: dict[str, str]) -> None:
    """Store the result. If that fails, the next start compiles again, mostly from Triton's cache."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(failed, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
