"""The peaks of a pair's device, which a lane's work is compared with. A CPU's are measured once and stored.

`measure_peaks` measures a CPU, in about a second, once per CPU, dtype and number of threads. Until then, a CPU's
peaks are unknown. If a lane exceeds one, it doubts it (cost_store.py), and the next measurement keeps the larger
figures. machine/cpu_speed.py has the method, machine/hardware.py the datasheets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from kernels.support import is_accelerator, runtime

from ..errors import WeightsError
from ..machine.cpu_speed import bandwidth_array_bytes, last_cache, product_flops, read_bandwidth
from ..machine.hardware import Peaks, dense_peak, known_bandwidth
from ..machine.user_cache import cache_root
from .cost_store import DOUBTS, can_keep, may_measure

# Version of the file's layout and of the measuring method: increase it when either changes.
FORMAT = 1
CPU_INFO = Path("/proc/cpuinfo")

_log = logging.getLogger(__name__)


def known_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Return a GPU's copy bandwidth and dense peak, or a CPU's stored peaks for torch's number of threads."""
    if is_accelerator(device):
        return Peaks(known_bandwidth(device), dense_peak(runtime(device).get_device_name(device), dtype))
    return (_read(peaks_path(dtype)) if may_measure() else None) or Peaks()


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Measure and store a CPU's peaks unless they are known; yield after each of the two figures.

    Measures nothing if the result could not be stored. Errors are only logged.
    """
    path = None if is_accelerator(device) or not may_measure() else peaks_path(dtype)
    if path is None or not can_keep(path):
        return
    known = _read(path)
    if known is not None and (known.bandwidth is not None or not bandwidth_array_bytes()) and path not in DOUBTS:
        return
    try:
        bandwidth = read_bandwidth()
        yield
        peaks = Peaks(bandwidth, product_flops(dtype))
    except (MemoryError, RuntimeError) as error:
        _log.warning("This CPU's peaks could not be measured (%s): %s", type(error).__name__, error)
        return
    if path in DOUBTS and known is not None:
        peaks = Peaks(_larger(peaks.bandwidth, known.bandwidth), _larger(peaks.flops, known.flops))
    DOUBTS.settle(path)
    _write(path, peaks)
    yield


def doubt_peaks(device: torch.device, dtype: torch.dtype) -> None:
    """Let the next `measure_peaks` measure a CPU's peaks again, because a lane exceeded them."""
    path = None if is_accelerator(device) or not may_measure() else peaks_path(dtype)
    if path is not None:
        DOUBTS.add(path)


def _larger(new: float | None, old: float | None) -> float | None:
    return max((value for value in (new, old) if value is not None), default=None)


def peaks_path(dtype: torch.dtype) -> Path | None:
    """Return the file of a CPU's peaks, or None if the user has no cache folder."""
    cpu = _cpu_name(), os.cpu_count(), last_cache()
    facts = FORMAT, *cpu, torch.__version__, torch.get_num_threads(), str(dtype)
    try:
        return cache_root() / "peaks" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    except WeightsError:
        return None


def _cpu_name() -> str:
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def _read(path: Path | None) -> Peaks | None:
    """Return the peaks in the file, or None if it is missing, damaged or has impossible values."""
    try:
        peaks = Peaks(**json.loads("" if path is None else path.read_text(encoding="utf-8")))
        values = asdict(peaks).values()
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    known = [value for value in values if value is not None]
    return peaks if peaks.flops and all(type(value) is float and 0 < value < math.inf for value in known) else None


def _write(path: Path, peaks: Peaks) -> None:
    """Write the peaks; if that fails, the next request measures again."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        part.write_text(json.dumps(asdict(peaks)), encoding="utf-8")
        os.replace(part, path)
