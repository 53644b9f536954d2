"""The GPU's kernels (kernels/triton): compiled once before anything runs, in processes that the compiler may end.

Contract: `prepare` compiles every launch that the models' shapes need on the device into Triton's own cache, where
the launches find it: no race compiles. A launch whose process dies (a compiler's assertion ends it), hangs, or
raises is left out: the log says so, and it takes other sizes or torch (kernels/triton/launch.py). What could not
be compiled is kept in the user's cache, so that the next start compiles nothing. Nothing is raised here. Off with
BASS_COMPILE_AHEAD=0, and on ZeroGPU, where there is no device yet. Read, not run on a GPU, which the compiler does
not need.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels.shapes import Card, Shape
from kernels.support import available, card_of, on_zero_gpu

from ..errors import WeightsError
from .cpu import cores
from .user_cache import cache_root

# What lists the launches of a shape; tests have lists of their own.
LISTED = "kernels.triton.needed:launches"
# Processes that compile at once, each with a share of the launches and about 0.5 GB of memory.
MOST_PROCESSES = 4
# Seconds without a word after which a process is ended: one launch takes one or two.
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


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
        with bar, ThreadPoolExecutor(count) as pool:
            starts = range(first, first + count * one_in, one_in)
            shares = [pool.submit(_share, order, start, bar, failed) for start in starts]
        if not all(share.result() for share in shares):
            return None
    return failed


def _share(order: dict[str, Any], first: int, bar: Any, failed: dict[str, str]) -> bool:
    """Compile every `step`-th launch from `first` on, in one process after another; whether it came to the end."""
    at: int | None = first
    while at is not None:
        start, at, name = at, None, ""
        try:
            for line in _lines({**order, "first": start}):
                if "total" in line:
                    bar.total = line["total"]
                elif "name" in line:
                    at, name = line["at"], line["name"]
                elif "error" in line:
                    at = None
                    bar.update()
                    if line["error"] is not None:
                        failed[name] = line["error"]
        except _Died as error:
            if at is None:
                # It died between two launches, or before the first: nothing says of what.
                _log.warning("The GPU's kernels can't be compiled ahead: %s.", error)
                return False
            failed[name] = str(error)
            bar.update()
            at += order["step"]
    return True


class _Died(Exception):
    """A process ended before its work did; the message says how."""


def _lines(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a process prints; raises _Died at its end if that came early."""
    command = [sys.executable, "-m", "kernels.triton.ahead", json.dumps(order)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    # No process takes memory of the device.
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        raise _Died(f"no process can be started ({error})") from error
    with process:
        timer = _patient(process.kill)
        try:
            for line in process.stdout or ():
                timer.cancel()
                with suppress(ValueError):  # whatever else a library prints
                    yield json.loads(line)
                timer = _patient(process.kill)
        finally:
            timer.cancel()
            process.kill()
    if process.returncode:
        code = process.returncode
        raise _Died(f"signal {-code} ended the compiler" if code < 0 else f"the compiler ended with status {code}")


def _patient(action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(PATIENCE_S, action)
    timer.daemon = True
    timer.start()
    return timer


def _file(card: Card, shapes: list[Shape], of: str) -> Path | None:
    """Where the result for these kernels, this Triton and this card is kept; None without a cache folder."""
    sources = sorted((ROOT / "kernels" / "triton").glob("*.py"))
    facts = [version("triton"), of, str(card), str(shapes), os.environ.get("TRITON_CACHE_DIR", "")]
    known = hashlib.sha256(json.dumps(facts).encode())
    for source in sources:
        known.update(source.read_bytes())
    try:
        return cache_root() / "triton" / f"{known.hexdigest()[:16]}.json"
    except WeightsError:
        return None


def _read(path: Path | None) -> dict[str, str] | None:
    try:
        found = json.loads("" if path is None else path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path | None, failed: dict[str, str]) -> None:
    """Keep the result; where that fails, the next start compiles again, out of Triton's cache."""
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(failed, indent=1) + "\n")
        os.replace(part, path)
