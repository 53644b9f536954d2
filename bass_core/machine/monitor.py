"""Sample the use of a device and this process in a daemon thread: `Monitor(device)`.

GPU figures come from NVML and describe the whole board; each is read independently. CPU share and memory are those
of this process only. A value that can't be read is None, never 0. lanes/utilization.py has figures per lane.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from .cpu import cores
from .gpm import METRICS, GpmSampler

MB = 2**20
GPU_FIELDS = (
    "gpu_utilization",
    "gpu_memory_mb",
    "gpu_memory_total_mb",
    "gpu_power_w",
    "gpu_energy_mj",
    *METRICS,
)


class Monitor:
    """Sample every `interval_s` seconds, between start() and stop() or as a context manager; may be restarted.

    `latest()` returns a dict that always has these keys:
        name: the device's name.
        kind: "cuda" or "cpu".
        gpu_utilization: percent of time busy.
        gpu_memory_mb, gpu_memory_total_mb: in 2**20 bytes.
        gpu_power_w: watts.
        gpu_energy_mj: millijoules since the driver was loaded.
        gpu_sm_percent, gpu_tensor_percent, gpu_dram_percent: Hopper and newer, see gpm.py.
        cpu_percent: of this process; 100 is one whole core.
        cpu_count: cores that this process may use.
        rss_mb: this process's memory in 2**20 bytes.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.2) -> None:
        self.device = device
        self.interval_s = interval_s
        self._process = psutil.Process()
        self._gpu: NvmlDevice | None = None
        self._thread: threading.Thread | None = None
        # Held while the thread runs; its release ends the thread. Unlike Event.set, Ctrl-C can't interrupt that.
        self._running: threading.Lock | None = None
        self._fixed = {"name": device_name(device), "kind": device.type}
        self._latest: dict[str, Any] = {
            **self._fixed,
            **dict.fromkeys((*GPU_FIELDS, "cpu_percent", "cpu_count", "rss_mb")),
        }

    def start(self) -> Monitor:
        """Start sampling; the first sample is taken before this returns."""
        if self._thread is None:
            self._running = threading.Lock()
            self._running.acquire()
            if self.device.type == "cuda":
                self._gpu = NvmlDevice(self.device)
            self._quietly(self._process.cpu_percent)  # psutil measures since its previous call
            self._latest = {**self._sample(), "cpu_percent": None}
            thread = threading.Thread(target=self._run, args=[self._running], name="bass-monitor", daemon=True)
            thread.start()
            self._thread = thread
        return self

    def stop(self) -> None:
        """End the thread and release NVML; `latest()` keeps the last sample."""
        running, self._running = self._running, None
        if running is not None:
            running.release()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            gpu.close()

    def latest(self) -> dict[str, Any]:
        """Return a copy of the newest sample."""
        return dict(self._latest)

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, running: threading.Lock) -> None:
        while not running.acquire(timeout=self.interval_s):
            self._latest = self._sample()

    def _sample(self) -> dict[str, Any]:
        return {
            **self._fixed,
            **(self._gpu.read() if self._gpu else dict.fromkeys(GPU_FIELDS)),
            "cpu_percent": self._quietly(self._process.cpu_percent),
            "cpu_count": cores(),
            "rss_mb": self._quietly(lambda: self._process.memory_info().rss / MB),
        }

    @staticmethod
    def _quietly(read: Callable[[], float]) -> float | None:
        try:
            return read()
        except (psutil.Error, OSError):
            return None


class NvmlDevice:
    """The board of a CUDA device in NVML; every field is None if NVML or the board is missing."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._gpm: GpmSampler | None = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml
        for uuid in _cuda_uuids(device):
            if self._handle is None:
                self._handle = self._call(partial(pynvml.nvmlDeviceGetHandleByUUID, uuid))
        if self._handle is not None:
            self._gpm = GpmSampler(pynvml, self._handle)

    def read(self) -> dict[str, float | None]:
        """Return the fields of GPU_FIELDS, None for each one that the board does not report."""
        if self._handle is None:
            return dict.fromkeys(GPU_FIELDS)
        nvml, board = self._nvml, self._handle
        return {
            "gpu_utilization": self._call(lambda: nvml.nvmlDeviceGetUtilizationRates(board).gpu),
            "gpu_memory_mb": self._call(lambda: nvml.nvmlDeviceGetMemoryInfo(board).used / MB),
            "gpu_memory_total_mb": self._call(lambda: nvml.nvmlDeviceGetMemoryInfo(board).total / MB),
            "gpu_power_w": self._call(lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1000),
            "gpu_energy_mj": self._call(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(board)),
            **(self._gpm.read() if self._gpm else dict.fromkeys(METRICS)),
        }

    def close(self) -> None:
        """Release NVML, which counts how often it was initialised."""
        if self._gpm is not None:
            self._gpm.close()
        if self._nvml is not None:
            self._call(self._nvml.nvmlShutdown)
            self._nvml = self._handle = None

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception:
            # Don't catch only NVMLError: if the driver is unloaded meanwhile, missing symbols raise other errors.
            return None


def _cuda_uuids(device: torch.device) -> list[str]:
    """Return the possible NVML UUIDs of a CUDA device.

    torch doesn't report whether the device is a whole board or a MIG slice. NVML's device indices don't help: they
    ignore CUDA_VISIBLE_DEVICES and have another order.
    """
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    except (AssertionError, AttributeError, RuntimeError):
        return []
    return [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]


def device_name(device: torch.device) -> str:
    """Return the device's human-readable name."""
    if device.type == "cuda":
        try:
            return torch.cuda.get_device_name(device)
        except (AssertionError, RuntimeError):
            return "CUDA device"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
