"""The GPU's kernels (kernels/triton): compiled once before anything runs, in processes that the compiler may end.

Contract: `prepare` compiles every launch that the models' shapes need on the device into Triton's own cache, where
the launches find it: no race compiles. A launch whose process dies (a compiler's assertion ends it), hangs, or
raises is left out: the log says so, and it takes other sizes or torch (kernels/triton/launch.py). What could not
be compiled is kept in Triton's cache as well, so that the next start compiles nothing; what may pass, such as a
full disk, is left out in this process alone. Nothing is raised here. Off with BASS_COMPILE_AHEAD=0, and on
ZeroGPU, where there is no device yet. Read, not run on a GPU, which the compiler does not need.
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
from kernels.support import PASSING_SIGNALS, available, card_of, on_zero_gpu

from .cpu import cores

# Our kernels by the name and the folder that they have here: in a wheel they are inside bass_core.
KERNELS = support.__name__.rpartition(".")[0] + ".triton"
SOURCES = Path(support.__file__).with_name("triton")
# What compiles, and what lists the launches of a shape; tests have lists of their own.
AHEAD, LISTED = f"{KERNELS}.ahead", f"{KERNELS}.needed:launches"
# Processes that compile at once, each with a share of the launches and about 0.5 GB of memory.
MOST_PROCESSES = 4
# Seconds without a word after which a process is ended: one launch takes one or two.
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


class Passing(str):
    """Why a launch could not be compiled, where the next start may find it otherwise."""


def prepare(device: torch.device, shapes: Callable[[], list[Shape]]) -> None:
    """Compile what models of these shapes launch on the device, unless an earlier start has."""
    off = os.environ.get("BASS_COMPILE_AHEAD") == "0" or on_zero_gpu()
    if off or device.type != "cuda" or not available(device):
        return
    leave_out(card_of(device), shapes())


def leave_out(card: Card, shapes: list[Shape], of: str = LISTED) -> None:
    """Compile for a card, and let no launch in this process compile what could not be compiled."""
    from kernels.triton.launch import left_out  # imports triton

    path = _file(card, shapes, of)
    failed = _read(path)
    if failed is None:
        failed = compile_all(card, shapes, of)
        if failed is None:
            return
        if not any(isinstance(why, Passing) for why in failed.values()):
            _write(path, failed)
    for name, why in failed.items():
        _log.warning("A GPU kernel was left out, other sizes or torch take its place (%s): %s", why, name[:300])
    left_out.update(failed)


def compile_all(
    card: Card, shapes: list[Shape], of: str = LISTED, one_in: int = 1, first: int = 0
) -> dict[str, str] | None:
    """The launches that could not be compiled, by name, with the reason; None if no process could begin.

    What takes the place of such a launch is compiled as well. one_in, first: each so manieth launch alone, from
    this one on (for tests).
    """
    order: dict[str, Any] = {"card": asdict(card), "shapes": [asdict(shape) for shape in shapes], "of": of}
    count, failed, known = max(1, min(cores(), MOST_PROCESSES)), dict[str, str](), -1
    while len(failed) > known:
        known = len(failed)
        order |= {"step": count * one_in, "left_out": list(failed)}
        bar = tqdm(desc="Compiling the GPU's kernels, once", unit=" variants")
        running = _Running()
        with bar, ThreadPoolExecutor(count) as pool:
            starts = range(first, first + count * one_in, one_in)
            shares = [pool.submit(_share, order, start, bar, failed, running) for start in starts]
            try:
                ended = [share.result() for share in shares]
            except BaseException:  # Ctrl-C, which reaches this process alone
                running.end()
                raise
        if not all(ended):
            return None
    return failed


class _Running:
    """The processes that compile now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self.ended = False

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start one, in a group of its own, so that what it starts ends with it. Raises _Died if that can't be."""
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
        """It is no more, and its number may become another's."""
        with self._lock:
            self._processes.discard(process)

    def end(self) -> None:
        """End all, and let none start any more."""
        with self._lock:
            self.ended = True
            for process in self._processes:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process that nobody has waited for, and what it has started, such as ptxas, which keeps its pipe."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _share(order: dict[str, Any], first: int, bar: Any, failed: dict[str, str], running: _Running) -> bool:
    """Compile every `step`-th launch from `first` on, in one process after another; whether it came to the end."""
    at: int | None = first
    while at is not None:
        start, at, name = at, None, ""
        try:
            for line in _lines({**order, "first": start}, running):
                if "total" in line:
                    bar.total = line["total"]
                elif "name" in line:
                    at, name = line["at"], line["name"]
                elif "error" in line:
                    at = None
                    bar.update()
                    if line["error"] is not None:
                        failed[name] = Passing(line["error"]) if line["passing"] else line["error"]
        except _Died as error:
            if running.ended:
                return False
            if at is None:
                # It died between two launches, or before the first: nothing says of what.
                _log.warning("The GPU's kernels can't be compiled ahead: %s.", error)
                return False
            failed[name] = Passing(error) if error.passing else str(error)
            bar.update()
            at += order["step"]
    return True


class _Died(Exception):
    """A process ended before its work did; the message says how. passing: it need not the next time."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


def _lines(order: dict[str, Any], running: _Running) -> Iterator[dict[str, Any]]:
    """What a process prints; raises _Died at its end if that came early."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    # No process takes memory of the device.
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    hung = threading.Event()
    with running.start([sys.executable, "-m", AHEAD, json.dumps(order)], environment) as process:
        timer = _patient(process, hung)
        try:
            for line in process.stdout or ():
                timer.cancel()
                with suppress(ValueError):  # whatever else a library prints
                    yield json.loads(line)
                timer = _patient(process, hung)
        finally:
            timer.cancel()
            running.forget(process)
            _kill(process)
    if hung.is_set():
        raise _Died(f"the compiler said nothing for {PATIENCE_S:g} s")
    if code := process.returncode:
        how = f"signal {-code} ended the compiler" if code < 0 else f"the compiler ended with status {code}"
        raise _Died(how, -code in PASSING_SIGNALS)


def _patient(process: subprocess.Popen[str], hung: threading.Event) -> threading.Timer:
    def end() -> None:
        hung.set()
        _kill(process)

    timer = threading.Timer(PATIENCE_S, end)
    timer.daemon = True
    timer.start()
    return timer


def _cache() -> Path:
    """The folder that Triton compiles into."""
    import triton

    with suppress(AttributeError):  # before Triton 3.4
        return Path(triton.knobs.cache.dir)
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _file(card: Card, shapes: list[Shape], of: str) -> Path:
    """Where the result for these kernels, this Triton and this card is kept: with what was compiled."""
    import triton

    facts = [triton.__version__, of, str(card), str(shapes)]
    known = hashlib.sha256(json.dumps(facts).encode())
    for source in sorted(SOURCES.glob("*.py")):
        known.update(source.read_bytes())
    return _cache() / f"bass-{known.hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, failed: dict[str, str]) -> None:
    """Keep the result; where that fails, the next start compiles again, out of Triton's cache."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(failed, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
